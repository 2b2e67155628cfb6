# SPDX-License-Identifier: Apache-2.0
"""The shared library of this folder's C++: compiled once for each kind of CPU, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.generic]

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
# Sums may be taken in any order, so that loops over them become vectors.
FLAGS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
# By torch's name of a CPU's instructions. Not -march=native: machines may share the cache.
INSTRUCTIONS = {
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ],
}


@cache
def library() -> ctypes.CDLL | None:
    """The library; None without a C++ compiler, and with a warning if the compiler fails."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = _command(compiler)
        kept = _folder() / f"kernels-{_digest(command)}.so"
        loaded = _loaded(kept)
        if loaded is None and compiler and shutil.which(compiler[0]) is not None:
            loaded = _compiled(command, kept)
        return loaded
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(
            f"kvfold's C++ kernels are not used, and quantized entries are read more slowly: {why}",
            stacklevel=2,
        )
        return None


def _command(compiler: list[str]) -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    command = [*compiler, *FLAGS, *INSTRUCTIONS.get(capability, [])]
    return command if sys.platform == "darwin" else [*command, "-fopenmp"]  # it has no OpenMP


def _digest(command: list[str]) -> str:
    """Of all that the library depends on: machines may share a cache."""
    machine = (platform.machine(), *platform.libc_ver())
    parts = [source.read_text("utf-8") for source in SOURCES]
    return hashlib.sha256("\0".join([*parts, *command, *machine]).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Where libraries are kept, if it can be written to."""
    try:
        home = Path.home()
    except RuntimeError:  # there is none
        home = Path(tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "kvfold"


def _loaded(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # it is not there, or damaged
        return None


def _compiled(command: list[str], kept: Path) -> ctypes.CDLL:
    """The library, compiled; its file is `kept` where that can be written."""
    with tempfile.TemporaryDirectory(prefix="kvfold-") as folder:
        made = Path(folder) / kept.name
        subprocess.run(
            [*command, *map(str, SOURCES), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
        )
        with suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(made, beside)
            beside.replace(kept)  # another process may do the same
        return ctypes.CDLL(str(made))


def call(function: str, *arguments: Tensor | Array | int | float) -> int:
    """Calls a function of the library, which must be available; arrays are contiguous.

    Arguments are pointers, int64 and float, as those of the first call are.
    """
    of_library = getattr(library(), function)
    if of_library.argtypes is None:
        of_library.argtypes = [_kind(argument) for argument in arguments]
        of_library.restype = ctypes.c_int64  # nonsense where the function returns nothing
    given: list[int | float] = []
    for argument in arguments:  # a step calls it in every layer: no function for each argument
        if isinstance(argument, Tensor):
            assert argument.is_contiguous() and argument.device.type == "cpu"
            given.append(argument.data_ptr())
        elif isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            given.append(argument.ctypes.data)
        else:
            given.append(argument)
    return int(of_library(*given))


def _kind(argument: Tensor | Array | int | float) -> type[ctypes._SimpleCData[Any]]:
    if isinstance(argument, Tensor | np.ndarray):
        return ctypes.c_void_p
    return ctypes.c_int64 if isinstance(argument, int) else ctypes.c_float
