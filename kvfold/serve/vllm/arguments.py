# SPDX-License-Identifier: Apache-2.0
"""What vLLM's command line says about its pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.head_pages.plugin import UNTESTED_GPU, backend

BLOCK = 32  # entries of a page: the fewest of vLLM's CPU kernels
RANKS = ("--tensor-parallel-size", "-tp")


def paged_of(arguments: Sequence[str]) -> Paged | None:
    """Pages of single heads of a vLLM with these arguments, BLOCK entries where they do not say.

    None where vLLM has none: on a GPU without `--untested-gpu`, with another attention, or of
    another dtype. Raises KvfoldError for numbers that are none.
    """
    name = backend()
    if name is None or _given(arguments, "--kv-cache-dtype") not in (None, "auto"):
        return None
    if name != "CPU_ATTN" and _given(arguments, "--attention-backend") != name:
        return None
    return Paged(_number(arguments, BLOCK, "--block-size"), _number(arguments, 1, *RANKS))


def on_untested_gpu(arguments: Sequence[str]) -> list[str]:
    """The arguments with FlashAttention, whose pages of single heads this process then allows.

    Raises KvfoldError for a vLLM on a CPU, and for another attention.
    """
    os.environ[UNTESTED_GPU] = "1"
    name = backend()
    if name != "FLASH_ATTN":
        raise KvfoldError("--untested-gpu is for a vLLM on an NVIDIA GPU: leave it out")
    given = _given(arguments, "--attention-backend")
    if given not in (None, name):
        raise KvfoldError(f"--untested-gpu goes with --attention-backend {name}, not {given}")
    return [*arguments, "--attention-backend", name]


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
