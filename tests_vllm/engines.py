# SPDX-License-Identifier: Apache-2.0
"""vLLM with the connector in this process, and its greedy answers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvfold.bundled import FOLDER
from kvfold.serve.vllm.placeholders import ServedFolder
from kvfold.serve.vllm.request import ContextPrompt
from tests_vllm.bundled import NEW, Kvfold, asked

PLAIN = list(range(5, 105))


@contextmanager
def engine(folder: Path, policy: str = "fail", **options: Any) -> Iterator[LLM]:
    """vLLM with the connector."""
    transfer = KVTransferConfig(
        kv_connector="KvfoldConnector",
        kv_connector_module_path="kvfold.serve.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"contexts": str(folder)},
    )
    settings = {
        "model": str(FOLDER),
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "disable_log_stats": False,
    }
    llm = LLM(**(settings | options), kv_transfer_config=transfer)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def sampling(new: int = NEW, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **options)


def answers(llm: LLM, requests: list[ContextPrompt | list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens of requests in one batch; plain ones are lists of tokens."""
    prompts = [
        r.prompt if isinstance(r, ContextPrompt) else {"prompt_token_ids": r} for r in requests
    ]
    extra = [r.extra_args if isinstance(r, ContextPrompt) else None for r in requests]
    how = [sampling(new, extra_args=args) for args in extra]
    outputs = llm.generate(prompts, how, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counters(llm: LLM) -> dict[str, int]:
    names = ("prefix_cache_hits", "external_prefix_cache_hits", "num_preemptions")
    found = {metric.name: metric for metric in llm.get_metrics()}
    return {name: found[f"vllm:{name}"].value for name in names}


def assert_answers_as_kvfold(
    llm: LLM, made: Kvfold, served_folder: ServedFolder, name: str
) -> None:
    """24 of 24 greedy tokens, three questions, two rounds, with an ordinary request each time."""
    expected = [made.answer(name, question) for question in made.questions]
    plain = made.greedy(torch.tensor([PLAIN]))
    requests = [asked(served_folder, made, name, question) for question in made.questions]
    for _ in range(2):
        assert answers(llm, [*requests, PLAIN]) == [*expected, plain]
