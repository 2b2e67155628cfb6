# SPDX-License-Identifier: Apache-2.0
"""The shared library of this folder's C++: compiled once for each kind of CPU, and kept.

Its file in the user's cache folder ends with a digest. A damaged library would end the process that
loads it, and one that another user has put there would run as this user.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.reading import opened_regular
from kvfold.writing import replacing

log = logging.getLogger(__name__)

Array = NDArray[np.generic]

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
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

SECONDS = 300  # that the compiler gets; it takes about twelve
MOST_WORDS = 2000  # bytes of what it says that are passed on
DIGEST = hashlib.sha256().digest_size
REMEDY = "set XDG_CACHE_HOME to a folder of your own"


@cache
def library() -> ctypes.CDLL | None:
    """The library; None without a C++ compiler, and with a warning if it cannot be had."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = _command(compiler)
        kept = cache_folder() / f"kernels-{_digest(command)}.so"
        # A copy is loaded: what is cut short while it is in use would end the process.
        with tempfile.TemporaryDirectory(prefix="kvfold-") as folder:
            made = Path(folder) / kept.name
            loaded = _loaded(read_kept(kept), made)
            if loaded is None and compiler and shutil.which(compiler[0]) is not None:
                log.warning("kvfold compiles its C++ kernels, once for this machine: about 12 s")
                _compile(command, made)
                loaded = ctypes.CDLL(str(made))
                keep(kept, made.read_bytes())
            return loaded
    except (OSError, ValueError, KvfoldError) as error:
        warnings.warn(
            "kvfold's C++ kernels are not used, and quantized entries are read more slowly: "
            f"{str(error) or type(error).__name__}",
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
    parts = [source.read_text("utf-8") for source in [*SOURCES, *HEADERS]]
    return hashlib.sha256("\0".join([*parts, *command, *machine]).encode()).hexdigest()[:16]


def _loaded(library: bytes | None, made: Path) -> ctypes.CDLL | None:
    """A kept library, from the file `made`; None if there is none, or not for this machine."""
    if library is None:
        return None
    made.write_bytes(library)
    try:
        return ctypes.CDLL(str(made))
    except OSError:
        return None


def _compile(command: list[str], made: Path) -> None:
    """Compiles the sources into the file `made`; raises KvfoldError, with the compiler's words."""
    whole = [*command, *map(str, SOURCES), "-o", str(made)]
    # A file takes its words: a pipe would be held open by programs that the compiler has started.
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            whole, stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise KvfoldError(f"{command[0]} took more than {SECONDS} s to compile them") from None
        finally:
            _end(process)
        told.seek(0)
        words = told.read(MOST_WORDS).decode(errors="replace").strip()
    if status != 0:
        raise KvfoldError(words or f"{command[0]} ended with status {status} and said nothing")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a compiler that still runs, with the programs that it has started."""
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cache_folder() -> Path:
    """kvfold's folder in this user's cache, which may be still to be made.

    Raises KvfoldError if there is no place for it, or if other users can change what is in it.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # a relative one is to be ignored
        caches = _home() / ".cache"
    folder = caches / "kvfold"
    with suppress(OSError):  # it is not there, or not for this user
        wrong = _others(folder.stat())
        if wrong is not None:
            raise KvfoldError(f"the folder {folder} {wrong}: {REMEDY}")
    return folder


def _home() -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # the user has no entry and the environment no name
        home = Path()
    if not home.is_absolute():
        raise KvfoldError(f"there is no home folder to keep them in: {REMEDY}")
    return home


def _others(state: os.stat_result) -> str | None:
    """Rights of users other than this one and root in a file, in words; None for none."""
    if sys.platform == "win32":
        return None
    if state.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (number {state.st_uid})"
    return "can be written to by other users" if state.st_mode & 0o022 else None


def read_kept(path: Path) -> bytes | None:
    """The library in a file; None if there is none, it is damaged, or others can change it."""
    try:
        with opened_regular(path) as file:
            if _others(os.fstat(file.fileno())) is not None:
                return None
            whole = file.read()
    except OSError:
        return None
    library, digest = whole[:-DIGEST], whole[-DIGEST:]
    return library if hashlib.sha256(library).digest() == digest else None


def keep(path: Path, library: bytes) -> None:
    """Puts a library into a file, where that can be written; other processes may do the same."""
    with suppress(OSError, KvfoldError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, rights=0o644) as temporary:
            temporary.write_bytes(library + hashlib.sha256(library).digest())


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


class _Done(threading.local):
    """Operations of this folder's C++, which torch's counters do not see."""

    operations = 0


_done = _Done()


def note_operations(multiply_adds: int) -> None:
    """Counts two operations per multiply-add, as torch's FlopCounterMode does."""
    _done.operations += 2 * multiply_adds


def operations_so_far() -> int:
    """Operations of all calls by this thread: a block's are the difference between two answers."""
    return _done.operations
