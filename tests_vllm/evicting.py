# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, with evictions, and what `CompressedCache` answers in its place."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from vllm import LLM, SamplingParams, envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.attention import selector

import kvfold
from kvfold.bundled import FOLDER
from kvfold.serve.vllm.evictions.asked import EVICT

PAGE, NEW = 32, 24


@dataclass(frozen=True)
class Asked:
    """What a request evicts; a method of None: nothing."""

    method: str | None = None
    budget: Any = None
    every: int | None = None

    @property
    def params(self) -> dict[str, Any] | None:
        """`kv_transfer_params` of the request."""
        given = {"method": self.method, "budget": self.budget, "every": self.every}
        named = {name: value for name, value in given.items() if value is not None}
        return {EVICT: named} if named else None

    @property
    def spec(self) -> str:
        """The same in process."""
        rounds = "" if self.every is None else f" + every:interval={self.every}"
        return f"{self.method}{rounds} + pages:size={PAGE}"


ORDINARY = Asked()


@dataclass
class Truth:
    """Greedy answers of the bundled model over a `CompressedCache`, each made once."""

    _made: dict[Any, list[int]] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return kvfold.bundled_model()

    def cache(self, asked: Asked) -> Any:
        """An empty cache that evicts as `asked`; None: transformers' own."""
        model, tokenizer = self.loaded
        if asked.method is None:
            return None
        return kvfold.CompressedCache(model, asked.spec, asked.budget, tokenizer=tokenizer)

    def answer(self, prompt: Sequence[int], asked: Asked = ORDINARY, new: int = NEW) -> list[int]:
        """So many tokens after a prompt."""
        key = (tuple(prompt), asked, new)
        if key not in self._made:
            ids = torch.tensor([list(prompt)])
            out = self.loaded[0].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache(asked),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=0,
            )
            self._made[key] = out[0, len(prompt) :].tolist()
        return self._made[key]

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], given: Sequence[int], asked: Asked) -> list[float]:
        """Of each of the `given` tokens after the prompt and those before it."""
        model, cache = self.loaded[0], self.cache(asked)
        found, read = [], torch.tensor([list(prompt)])
        for token in given:
            out = model(read, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(float(out.logits[0, -1].log_softmax(-1)[token]))
            read = torch.tensor([[token]])
        return found


def text(seed: int, tokens: int) -> list[int]:
    """Random tokens, each once: of equal ones the scores would tie."""
    return random.Random(seed).sample(range(5, 2000), tokens)


def sampling(asked: Asked = ORDINARY, new: int = NEW, **options: Any) -> SamplingParams:
    """Greedy sampling, unless `options` say otherwise."""
    extra = None if asked.params is None else {"kv_transfer_params": asked.params}
    settings = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "extra_args": extra}
    return SamplingParams(**(settings | options))


@contextmanager
def engine(
    *, connector: bool = True, extra: dict[str, Any] | None = None, **options: Any
) -> Iterator[LLM]:
    """vLLM in this process, so that its pool of blocks can be looked at.

    `extra` is the connector's.
    """
    transfer = KVTransferConfig(
        kv_connector="KvfoldConnector",
        kv_connector_module_path="kvfold.serve.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra or {},
    )
    settings = {
        "model": str(FOLDER),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "enforce_eager": True,
        "max_num_seqs": 16,
        "block_size": PAGE,
        "seed": 0,
        "kv_transfer_config": transfer if connector else None,
    }
    envs.disable_envs_cache()
    llm = None
    try:
        with patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
            llm = LLM(**(settings | options))
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()  # an engine that did not start leaves its connector
        del llm
        gc.collect()
        envs.disable_envs_cache()


def generated(llm: LLM, prompts: Sequence[list[int]], how: Sequence[SamplingParams]) -> list[Any]:
    """vLLM's outputs of prompts in one batch."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, list(how), use_tqdm=False)


def answers(
    llm: LLM, requests: Sequence[tuple[list[int], Asked]], new: int = NEW
) -> list[list[int]]:
    """Greedy tokens of requests in one batch."""
    outputs = generated(
        llm, [prompt for prompt, _ in requests], [sampling(asked, new) for _, asked in requests]
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def choose_anew() -> None:
    """Lets vLLM choose its attention by what is registered now, not as in an earlier engine."""
    selector._cached_get_attn_backend.cache_clear()


def attention(llm: LLM) -> set[str]:
    """Names of the classes that attend."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers}


def scheduler(llm: LLM) -> Any:
    """vLLM's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def pool(llm: LLM) -> Any:
    """vLLM's pool of blocks."""
    return scheduler(llm).kv_cache_manager.block_pool


def in_use(llm: LLM) -> int:
    """Blocks that requests hold."""
    return int(pool(llm).num_gpu_blocks - 1 - pool(llm).get_num_free_blocks())


def without_room(llm: LLM) -> list[str]:
    """Names of requests that wait for blocks, by which they are admitted."""
    evicting = scheduler(llm).connector.scheduler_side.evicting
    return [one.request_id.split("-")[0] for one in scheduler(llm).waiting if evicting.waits(one)]
