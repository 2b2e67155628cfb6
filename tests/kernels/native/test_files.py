# SPDX-License-Identifier: Apache-2.0
"""Rows of a file, from file systems that are interrupted or give less at once."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvfold.kernels.native

SOURCE = Path(kvfold.kernels.native.__file__).with_name("files.cpp")
# The source with a `pread` that is interrupted at every second call, and gives 3 bytes otherwise
PROGRAM = """
#include <cerrno>
#include <unistd.h>
static ssize_t slow_pread(int file, void* out, size_t count, off_t at) {{
    static int calls = 0;
    if (calls++ % 2) {{
        errno = EINTR;
        return -1;
    }}
    return pread(file, out, count < 3 ? count : 3, at);
}}
#define pread slow_pread
#include "{source}"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it reads nothing at an offset")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_interrupted_and_short_reads_go_on(tmp_path):
    program, library = tmp_path / "slow.cpp", tmp_path / "slow.so"
    program.write_text(PROGRAM.format(source=SOURCE))
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", program, "-o", library], check=True)
    read_rows = ctypes.CDLL(str(library)).read_rows
    read_rows.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3]
    read_rows.restype = ctypes.c_int64
    path, out = tmp_path / "rows", ctypes.create_string_buffer(16)
    path.write_bytes(bytes(range(40)))
    file = os.open(path, os.O_RDONLY)
    try:
        assert read_rows(file, (ctypes.c_int64 * 2)(20, 5), out, 2, 8, 1) == 0
        assert out.raw == bytes([*range(20, 28), *range(5, 13)])
        assert read_rows(file, (ctypes.c_int64 * 1)(36), out, 1, 8, 1) == 1
    finally:
        os.close(file)
