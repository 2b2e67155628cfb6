# SPDX-License-Identifier: Apache-2.0
"""The shared library of this folder's C++: compiled once for each kind of CPU, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

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
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(
            f"kvfold's C++ kernels are not used, and quantized entries are read more slowly: {why}",
            stacklevel=2,
        )
        return None


def _compiled(compiler: list[str]) -> Path:
    """Path of the library, which is compiled if it is not there."""
    capability = torch.backends.cpu.get_cpu_capability()
    command = [*compiler, *FLAGS, *INSTRUCTIONS.get(capability, [])]
    if sys.platform != "darwin":  # its compiler has no OpenMP
        command.append("-fopenmp")
    contents = b"".join(source.read_bytes() for source in SOURCES)
    digest = hashlib.sha256(contents + " ".join(command).encode()).hexdigest()[:16]
    path = _folder() / f"kernels-{digest}.so"
    if not path.exists():
        handle, made = tempfile.mkstemp(dir=path.parent, suffix=".so")
        os.close(handle)
        try:
            subprocess.run(
                [*command, *map(str, SOURCES), "-o", made],
                check=True,
                capture_output=True,
                text=True,
            )
            Path(made).replace(path)  # another process may do the same
        finally:
            Path(made).unlink(missing_ok=True)
    return path


def _folder() -> Path:
    """Where libraries are kept: the user's cache, or a folder of this process."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # nowhere to write, or no home
        pass
    return Path(tempfile.mkdtemp(prefix="kvfold-"))


def call(function: str, *arguments: Tensor | Array | int | float) -> int:
    """Calls a function of the library, which must be available; arrays are contiguous."""
    known = library()
    assert known is not None
    of_library = known[function]
    of_library.restype = ctypes.c_int64  # nonsense where the function returns nothing
    return int(of_library(*(_as_c(argument) for argument in arguments)))


def _as_c(
    argument: Tensor | Array | int | float,
) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous() and argument.device.type == "cpu"
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    return ctypes.c_float(argument)
