# SPDX-License-Identifier: Apache-2.0
"""Names in figures, which matplotlib would read as mathematics between two $."""

from __future__ import annotations


def plain(text: str) -> str:
    """A name with $ escaped, so that a figure shows it as it is."""
    return text.replace("$", r"\$")
