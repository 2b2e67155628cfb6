# SPDX-License-Identifier: Apache-2.0
"""What vLLM's command line says about its pages."""

from __future__ import annotations

import pytest

from kvfold import KvfoldError
from kvfold.serve.vllm.arguments import on_untested_gpu, paged_of
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.head_pages.plugin import UNTESTED_GPU
from tests.helpers.vllm import vllm_on


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", Paged(32, 1)),
        ("--block-size 64", Paged(64, 1)),
        ("--block-size=64", Paged(64, 1)),
        ("--block_size 64", Paged(64, 1)),
        ("--block-size 64 --block-size 128", Paged(128, 1)),
        ("-tp 2", Paged(32, 2)),
        ("--tensor-parallel-size=2 --block-size 64 --max-model-len 1024", Paged(64, 2)),
        ("--tensor_parallel_size 2", Paged(32, 2)),
        ("--kv-cache-dtype auto", Paged(32, 1)),
        ("--kv-cache-dtype fp8", None),
        ("--kv_cache_dtype=fp8_e5m2 --block-size 64", None),
        ("--served-model-name --block-size=64", Paged(64, 1)),
    ],
)
def test_pages_are_those_of_the_arguments(monkeypatch, arguments, expected) -> None:
    vllm_on(monkeypatch, cpu=True)
    assert paged_of(arguments.split()) == expected


def test_on_a_gpu_there_are_pages_of_single_heads_where_they_are_asked_for(monkeypatch) -> None:
    vllm_on(monkeypatch, cpu=False)
    monkeypatch.delenv(UNTESTED_GPU, raising=False)
    words, flash = ["--block-size", "64"], ["--attention-backend", "FLASH_ATTN"]
    assert paged_of(words) is None and paged_of([*words, *flash]) is None
    monkeypatch.setenv(UNTESTED_GPU, "")  # so that it is put back
    assert on_untested_gpu(words) == [*words, *flash]
    assert paged_of([*words, *flash]) == Paged(64, 1) and paged_of(words) is None
    assert paged_of([*words, "--attention-backend=FLASHINFER"]) is None
    with pytest.raises(KvfoldError, match="goes with --attention-backend FLASH_ATTN, not FLASHI"):
        on_untested_gpu(["--attention_backend=FLASHINFER"])


def test_an_untested_gpu_is_no_cpu(monkeypatch) -> None:
    vllm_on(monkeypatch, cpu=True)
    monkeypatch.setenv(UNTESTED_GPU, "")
    with pytest.raises(KvfoldError, match="--untested-gpu is for a vLLM on an NVIDIA GPU"):
        on_untested_gpu([])


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--block-size many", "--block-size is a whole number above 0, not 'many'"),
        ("--block-size 0", "--block-size is a whole number above 0, not '0'"),
        ("--block-size=-16", "--block-size is a whole number above 0, not '-16'"),
        ("--block-size", "--block-size is a whole number above 0, not ''"),
        ("-tp 1.5", "--tensor-parallel-size is a whole number above 0, not '1.5'"),
    ],
)
def test_numbers_that_are_none_are_told(monkeypatch, arguments, said) -> None:
    vllm_on(monkeypatch, cpu=True)
    with pytest.raises(KvfoldError) as refusal:
        paged_of(arguments.split())
    assert str(refusal.value) == said
