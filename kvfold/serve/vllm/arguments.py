# SPDX-License-Identifier: Apache-2.0
"""What vLLM's command line says about its pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.export import Paged

BLOCK = 32  # entries of a page: the fewest of vLLM's CPU kernels
RANKS = ("--tensor-parallel-size", "-tp")


def paged_of(arguments: Sequence[str]) -> Paged | None:
    """Pages of single heads of a vLLM with these arguments, BLOCK entries where they do not say.

    None where vLLM has none: off a CPU, or of another dtype. Raises KvfoldError for numbers that
    are none.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or _given(arguments, "--kv-cache-dtype") not in (None, "auto"):
        return None
    return Paged(_number(arguments, BLOCK, "--block-size"), _number(arguments, 1, *RANKS))


def _number(arguments: Sequence[str], usual: int, *names: str) -> int:
    given = _given(arguments, *names)
    if given is None:
        return usual
    if not given.isdecimal() or int(given) == 0:
        raise KvfoldError(f"{names[0]} is a whole number above 0, not {given!r}")
    return int(given)


def _given(arguments: Sequence[str], *names: str) -> str | None:
    """The value of the option `names`, the last one's; None: it is not given."""
    found = None
    for word, after in pairwise([*arguments, ""]):
        name, sign, value = word.partition("=")
        if name.replace("_", "-") in names:  # vLLM takes both
            found = value if sign else after
    return found
