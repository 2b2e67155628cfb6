# SPDX-License-Identifier: Apache-2.0
"""Parts of a page that scripts write, between a line that names the script and an end mark."""

from __future__ import annotations

END = "<!-- end -->"


def with_part(page: str, begin: str, made: str) -> str:
    """`page` with `made` from the line `begin` to the next end mark; ValueError without both."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the page lacks the lines {begin} and {END}")
    return f"{before}{begin}\n{made}{END}{after}"
