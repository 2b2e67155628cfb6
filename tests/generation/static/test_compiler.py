# SPDX-License-Identifier: Apache-2.0
"""Whether the C++ compiler knows the CPU's vectors is asked once, and the user's word holds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor

from kvfold.generation.static.compiler import compiling, takes_vectors


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    takes_vectors.cache_clear()
    yield
    takes_vectors.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_that_knows_them_is_believed(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("kvfold.generation.static.compiler.INSTRUCTIONS", {"AVX2": ["-DNOTHING"]})
    assert takes_vectors() is True


@pytest.mark.parametrize(
    ("flags", "compiler"), [("-mno-such-vectors", "g++"), ("-DNOTHING", "no-such-compiler")]
)
def test_one_that_does_not_is_left_to_torch(monkeypatch, flags, compiler):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("kvfold.generation.static.compiler.INSTRUCTIONS", {"AVX2": [flags]})
    monkeypatch.setenv("CXX", compiler)
    assert takes_vectors() is None


def test_other_cpus_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert takes_vectors() is None


@pytest.mark.parametrize("said", [True, False])
def test_what_the_environment_says_holds(said):
    with inductor.patch({"cpp.vec_isa_ok": said}), compiling():
        assert inductor.cpp.vec_isa_ok is said


def test_settings_are_those_of_before_afterwards():
    before = inductor.cpp.vec_isa_ok, inductor.reorder_for_locality
    with compiling():
        assert not inductor.reorder_for_locality
    assert before == (inductor.cpp.vec_isa_ok, inductor.reorder_for_locality)
