# SPDX-License-Identifier: Apache-2.0
"""The compiler's settings for graphs of decode steps."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch._dynamo import config as dynamo
from torch.fx.experimental import _config as shapes

from kvfold.kernels.native.library import INSTRUCTIONS

GRAPHS = 64  # most graphs of one function, before torch.compile refuses more
SECONDS = 60  # that the C++ compiler gets to read its flags


@contextmanager
def compiling() -> Iterator[None]:
    """Context with the compiler's settings for graphs."""
    from torch._inductor import config as inductor  # takes a second

    known = inductor.cpp.vec_isa_ok  # of the environment
    with (
        # Else sizes that happen to be equal in one cache would be required equal in all.
        shapes.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # Else a read moved past a write would make it copy the whole buffers.
        inductor.patch(reorder_for_locality=False),
        # Else it compiles and loads a program for each kind of vectors that the CPU has, 6 s.
        inductor.patch({"cpp.vec_isa_ok": takes_vectors() if known is None else known}),
        # Each method that evicts has its own graphs.
        dynamo.patch(recompile_limit=GRAPHS),
    ):
        yield


@cache
def takes_vectors() -> bool | None:
    """True if the C++ compiler knows this CPU's vector instructions; None: torch has to find out.

    torch has named the instructions after what the CPU has and what it was built with itself.
    """
    flags = INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())
    if flags is None:
        return None
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return True
