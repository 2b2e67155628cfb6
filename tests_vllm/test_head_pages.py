# SPDX-License-Identifier: Apache-2.0
"""vLLM attends to pages of single heads: contexts whose heads keep different numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from kvfold.bundled import FOLDER
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.placeholders import ServedFolder
from tests_vllm.bundled import NEW, PAGED, SIXTEEN, Kvfold, asked, paged
from tests_vllm.engines import PLAIN, answers, counters, engine, sampling

BLOCK = 32
EVEN = "same-count"  # heads that keep equally many, in the same batch


@pytest.fixture(scope="module")
def served_folder(made: Kvfold, folder: Path) -> ServedFolder:
    return ServedFolder(folder, Paged(BLOCK))


@pytest.fixture(scope="module")
def llm(folder: Path, made: Kvfold) -> Iterator[LLM]:
    with engine(folder, block_size=BLOCK) as started:
        yield started


@pytest.fixture(scope="module")
def expected(made: Kvfold) -> dict[str, list[list[int]]]:
    """What kvfold answers in process."""
    names = [EVEN, *map(paged, PAGED)]
    return {name: [made.answer(name, each) for each in made.questions] for name in names}


def test_heads_keep_different_numbers(made, served_folder, expected):
    """So that equal answers say something."""
    shapes = set()
    for method in PAGED:
        counts = made.contexts[paged(method)].stats().kept
        pages = served_folder.get(paged(method)).pages
        rest = len(made.contexts[paged(method)].ids[0]) % BLOCK
        assert [[rest + BLOCK * n for n in layer] for layer in pages.of_layers] == [
            list(layer[0]) for layer in counts
        ]
        assert len({count for layer in pages.of_layers for count in layer}) > 1
        shapes.add(pages)
    assert len(PAGED) >= 12 and len(shapes) >= 5
    assert len({str(found) for found in expected.values()}) >= 12


@pytest.mark.parametrize("method", PAGED)
def test_vllm_answers_from_pages_as_kvfold_does(llm, made, served_folder, expected, method):
    """24 of 24 tokens, three questions, in one batch with an ordinary request and an even context.

    The second round finds full pages in the prefix cache.
    """
    name = paged(method)
    plain = made.greedy(torch.tensor([PLAIN]))
    requests = [asked(served_folder, made, name, question) for question in made.questions]
    even = asked(served_folder, made, EVEN, made.questions[0])
    for _ in range(2):
        found = answers(llm, [*requests, PLAIN, even])
        assert found == [*expected[name], plain, expected[EVEN][0]]
    assert llm.reset_prefix_cache()  # refused while a block is in use


def test_contexts_in_pages_take_turns_in_one_batch(llm, made, served_folder, expected):
    names = [*map(paged, PAGED), EVEN]
    requests = [asked(served_folder, made, name, made.questions[1]) for name in names]
    assert answers(llm, requests) == [expected[name][1] for name in names]
    assert llm.reset_prefix_cache()


def test_full_pages_are_found_in_the_prefix_cache(llm, made, served_folder):
    name = paged("kvzip")
    kept = served_folder.get(name).kept
    assert llm.reset_prefix_cache()
    before = counters(llm)
    for question in made.questions[:2]:
        answers(llm, [asked(served_folder, made, name, question)])
    after = counters(llm)
    hits = {key: after[key] - before[key] for key in after}
    assert hits["external_prefix_cache_hits"] == kept + kept % BLOCK
    assert hits["prefix_cache_hits"] == kept - kept % BLOCK


def test_pages_of_another_size_are_refused_alone(llm, made, folder, served_folder, expected):
    other = ServedFolder(folder, Paged(16))
    wrong = asked(other, made, SIXTEEN, made.questions[0])
    right = asked(served_folder, made, paged("kvzip"), made.questions[0])
    prompts = [wrong.prompt, {"prompt_token_ids": PLAIN}, right.prompt]
    how = [sampling(extra_args=args) for args in (wrong.extra_args, None, right.extra_args)]
    outputs = llm.generate(prompts, how, use_tqdm=False)
    failed, plain, fine = (output.outputs[0] for output in outputs)
    assert failed.finish_reason == "error" and list(failed.token_ids) == []
    assert list(plain.token_ids) == made.greedy(torch.tensor([PLAIN]))
    assert list(fine.token_ids) == expected[paged("kvzip")][0]
    assert llm.reset_prefix_cache()


# --- ordinary requests ---------------------------------------------------------------------------

ORDINARY = [PLAIN, list(range(300, 340)), [7], list(range(1000, 1333))]
STOCK = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
if __name__ == "__main__":
    settings, prompts, new = json.loads(sys.argv[1])
    llm = LLM(**settings)
    assert "kvfold" not in AttentionBackendEnum.CPU_ATTN.get_path()
    how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=3)
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [out.outputs[0] for out in llm.generate(prompts, how, use_tqdm=False)]
    found = [
        [[[token, one.logprob] for token, one in step.items()] for step in out.logprobs]
        for out in outputs
    ]
    json.dump(found, open(sys.argv[2], "w"))
"""


def test_ordinary_requests_are_answered_bit_for_bit_as_by_stock(llm, tmp_path):
    """By a vLLM that has neither the connector nor the plug-in."""
    assert llm.reset_prefix_cache()
    how = sampling(NEW, logprobs=3)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in ORDINARY]
    outputs = [out.outputs[0] for out in llm.generate(prompts, how, use_tqdm=False)]
    found = [
        [[[token, one.logprob] for token, one in step.items()] for step in out.logprobs]
        for out in outputs
    ]
    settings = {
        "model": str(FOLDER), "dtype": "float32", "max_model_len": 1024, "enforce_eager": True,
        "max_num_seqs": 8, "block_size": BLOCK,
    }  # fmt: skip
    path = tmp_path / "stock.json"
    given = json.dumps([settings, ORDINARY, NEW])
    environment = os.environ | {"VLLM_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", STOCK, given, path], env=environment, check=True)
    assert found == json.loads(path.read_text())


# --- other engines -------------------------------------------------------------------------------


def test_preempted_requests_with_pages_are_laid_anew(folder, made, served_folder):
    """Their blocks were another request's meanwhile."""
    new, names = 120, [paged(method) for method in ("keydiff", "adakv", "random")]
    with engine(folder, block_size=BLOCK, num_gpu_blocks_override=27, max_model_len=512) as small:
        requests = [asked(served_folder, made, name, made.questions[1]) for name in names]
        expected = [made.answer(name, made.questions[1], new) for name in names]
        assert answers(small, requests, new) == expected
        assert counters(small)["num_preemptions"] > 0
        assert small.reset_prefix_cache()


def test_two_ranks_answer_from_pages_as_kvfold_does(folder, made, expected):
    """A rank holds the pages of its own heads, and both as many blocks as the larger share."""
    ranks = ServedFolder(folder, Paged(BLOCK, 2))
    with engine(folder, block_size=BLOCK, tensor_parallel_size=2) as two:
        for name in (paged("kvzip"), paged("pyramidkv + adakv")):
            requests = [asked(ranks, made, name, question) for question in made.questions]
            for _ in range(2):
                assert answers(two, requests) == expected[name]
        assert two.reset_prefix_cache()


def test_without_the_plugin_pages_are_refused(folder, made, served_folder, monkeypatch):
    """The attention of such a vLLM would read them as those of all heads."""
    monkeypatch.setenv("VLLM_PLUGINS", "")
    name = paged("kvzip")
    with engine(folder, block_size=BLOCK) as stock:
        wrong = asked(served_folder, made, name, made.questions[0])
        right = asked(served_folder, made, EVEN, made.questions[0])
        how = [sampling(extra_args=each.extra_args) for each in (wrong, right)]
        outputs = stock.generate([wrong.prompt, right.prompt], how, use_tqdm=False)
        failed, fine = (output.outputs[0] for output in outputs)
        assert failed.finish_reason == "error"
        assert list(fine.token_ids) == made.answer(EVEN, made.questions[0])
