# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention with pages of single heads, its kernels as torch models on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.head_pages.plugin import BACKENDS, register
from kvfold.serve.vllm.placeholders import ServedFolder
from tests_vllm import engines, evicting, flash_model
from tests_vllm.bundled import asked, paged
from tests_vllm.engines import PLAIN
from tests_vllm.evicting import Asked, Truth, attention, choose_anew, in_use, text

BLOCK = 32
CONTEXTS = ["kvzip", "adakv", "pyramidkv + adakv", "knorm"]


@pytest.fixture(scope="module")
def flash() -> Iterator[None]:
    """vLLM takes this backend for its own of a CPU."""
    path = f"{flash_model.__name__}.{flash_model.OnCpuBackend.__qualname__}"
    with pytest.MonkeyPatch.context() as patch:
        flash_model.install(patch)
        patch.setitem(BACKENDS, "CPU_ATTN", path)
        register()
        choose_anew()
        yield
    register()
    choose_anew()


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def test_contexts_whose_heads_differ_are_answered_as_in_process(flash, folder, made):
    served = ServedFolder(folder, Paged(BLOCK))
    names = [paged(method) for method in CONTEXTS]
    with evicting.engine(extra={"contexts": str(folder)}) as llm:
        assert attention(llm) == {"OnCpu"}
        for name in names:
            expected = [made.answer(name, question) for question in made.questions]
            requests = [asked(served, made, name, question) for question in made.questions]
            plain = made.greedy(torch.tensor([PLAIN]))
            for _ in range(2):
                assert engines.answers(llm, [*requests, PLAIN]) == [*expected, plain]
        assert llm.reset_prefix_cache()


EVICTED = [
    Asked("snapkv:window=8", 0.4),
    Asked("pyramidkv:window=8", 0.4, 32),
    Asked("snapkv:window=8 + adakv", 0.3, 32),
    Asked("knorm", 96, 32),
]


def test_evictions_are_answered_as_in_process(flash, truth):
    """One after another, then in one batch with ordinary requests, over shared prefixes."""
    requests: list[Any] = [(text(seed, 150 + 30 * seed), each) for seed, each in enumerate(EVICTED)]
    requests += [(text(9, 333), Asked()), (text(1, 180), Asked())]
    expected = [truth.answer(prompt, each, 100) for prompt, each in requests]
    with evicting.engine() as llm:
        assert attention(llm) == {"OnCpu"}
        for request, answer in zip(requests, expected, strict=True):
            assert evicting.answers(llm, [request], 100) == [answer]
        assert evicting.answers(llm, requests, 100) == expected
        assert in_use(llm) == 0
