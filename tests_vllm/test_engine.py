# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, unmodified, answers from compressed contexts as kvfold does in process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

import kvfold
from kvfold.bundled import FOLDER
from kvfold.serve.vllm.request import CONTEXT
from tests_vllm.bundled import LEVELLED, NAMES, UNEVEN, Kvfold, asked
from tests_vllm.engines import PLAIN, answers, assert_answers_as_kvfold, counters, engine, sampling


@pytest.fixture(scope="module")
def llm(folder: Path, made: Kvfold) -> Iterator[LLM]:
    with engine(folder) as started:
        yield started


@pytest.mark.parametrize("name", NAMES)
def test_vllm_answers_as_kvfold_does(llm, made, served_folder, name):
    assert_answers_as_kvfold(llm, made, served_folder, name)


def test_the_contexts_would_be_told_apart(made):
    found = {name: [made.answer(name, each) for each in made.questions] for name in NAMES}
    assert len({str(tokens) for tokens in found.values()}) >= 13
    assert found["whole-pages"] != found["same-count"]


def test_heads_were_uneven_before_they_were_levelled(made):
    for name, (method, budget, rule) in LEVELLED.items():
        level = made.contexts[name].level
        assert level.rule == rule and level.kl > 0
        uneven = kvfold.compress(made.model, made.tokenizer, made.document, method, budget)
        counts = [count for layer in uneven.stats().kept for count in layer[0]]
        assert max(counts) > 1.3 * min(counts)
        assert level.tokens > sum(counts) / len(counts) or rule != "union"


def test_contexts_take_turns_in_one_batch(llm, made, served_folder):
    question = made.questions[0]
    requests = [asked(served_folder, made, name, question) for name in NAMES]
    assert answers(llm, requests) == [made.answer(name, question) for name in NAMES]


def test_the_first_question_loads_and_the_others_find_it_cached(llm, made, served_folder):
    llm.reset_prefix_cache()
    before = counters(llm)
    rounds = []
    for question in made.questions:
        answers(llm, [asked(served_folder, made, "whole-pages", question)])
        after = counters(llm)
        rounds.append({name: after[name] - before[name] for name in after})
        before = after
    loaded = [found["external_prefix_cache_hits"] for found in rounds]
    cached = [found["prefix_cache_hits"] for found in rounds]
    assert loaded == [256, 0, 0] and cached == [0, 256, 256]


def test_of_a_broken_page_only_the_rest_is_loaded_again(llm, made, served_folder):
    llm.reset_prefix_cache()
    before = counters(llm)
    for question in made.questions[:2]:
        answers(llm, [asked(served_folder, made, "broken-page", question)])
    after = counters(llm)
    assert after["external_prefix_cache_hits"] - before["external_prefix_cache_hits"] == 300 + 44
    assert after["prefix_cache_hits"] - before["prefix_cache_hits"] == 256


# --- what is refused -----------------------------------------------------------------------------

WRONG = {
    "no salt": {"salt": None},
    "another's salt": {"salt": "same-count"},
    "no context": {"args": {}},
    "another context": {"args": {CONTEXT: "same-count"}},
    "an unknown context": {"args": {CONTEXT: "none"}},
    "a path": {"args": {CONTEXT: "../whole-pages"}},
    "packed entries": {"args": {CONTEXT: "packed"}},
    "entries with a bias": {"args": {CONTEXT: "biased"}},
    "uneven heads": {"args": {CONTEXT: UNEVEN}},
    "other weights": {"name": "stranger"},
    "other placeholders": {"tokens": [5] * 300},
    "few placeholders": {"tokens": [5]},
    "nothing asked": {"question": []},
    "prompt logprobs": {"options": {"prompt_logprobs": 1}},
    "no cached pages": {"options": {"skip_reading_prefix_cache": True}},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_request_that_would_be_answered_wrongly_fails_alone(llm, made, served_folder, case):
    wrong: dict[str, Any] = WRONG[case]
    question = made.questions[0]
    served = served_folder.get(wrong.get("name", "whole-pages"))
    right = asked(served_folder, made, "whole-pages", question)
    tokens = wrong.get("tokens", [*served.tokens, *wrong.get("question", right.question)])
    salt = wrong.get("salt", served.id)
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if salt is not None:
        prompt["cache_salt"] = served_folder.get(salt).salt
    extra = {"kv_transfer_params": wrong.get("args", {CONTEXT: served.id})}
    how = sampling(extra_args=extra, **wrong.get("options", {}))
    beside = [sampling(), sampling(extra_args=right.extra_args)]
    prompts = [prompt, {"prompt_token_ids": PLAIN}, right.prompt]
    failed, plain, fine = (
        output.outputs[0] for output in llm.generate(prompts, [how, *beside], use_tqdm=False)
    )
    assert failed.finish_reason == "error" and list(failed.token_ids) == []
    assert list(plain.token_ids) == made.greedy(torch.tensor([PLAIN]))
    assert list(fine.token_ids) == made.answer("whole-pages", question)


def test_a_file_that_goes_away_fails_its_requests_only(llm, made, served_folder, folder):
    path = folder / "gone.kvfold"
    path.write_bytes(served_folder.path("whole-pages").read_bytes())
    made.contexts["gone"] = made.contexts["whole-pages"]
    llm.reset_prefix_cache()
    request = asked(served_folder, made, "gone", made.questions[0])
    path.unlink()
    (output,) = llm.generate([request.prompt], sampling(extra_args=request.extra_args))
    assert output.outputs[0].finish_reason == "error"
    del made.contexts["gone"]
    assert_answers_as_kvfold(llm, made, served_folder, "whole-pages")


def test_a_new_version_of_a_file_is_never_answered_from_the_old_ones_pages(
    llm, made, served_folder, folder
):
    path, question = folder / "changing.kvfold", made.questions[1]
    for name in ("whole-pages", "same-count"):
        path.write_bytes(served_folder.path(name).read_bytes())
        made.contexts["changing"] = made.contexts[name]
        request = asked(served_folder, made, "changing", question)
        assert answers(llm, [request]) == [made.answer(name, question)]
    stale = dataclasses.replace(request, served=served_folder.get("whole-pages"))
    extra = {"kv_transfer_params": {CONTEXT: "changing"}}
    (output,) = llm.generate([stale.prompt], sampling(extra_args=extra))
    assert output.outputs[0].finish_reason == "error"
    del made.contexts["changing"]


# --- other engines -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["broken-page", "segments"])
def test_two_ranks_answer_as_kvfold_does(ranks, made, served_folder, name):
    assert_answers_as_kvfold(ranks, made, served_folder, name)


@pytest.fixture(scope="module")
def ranks(folder: Path, made: Kvfold) -> Iterator[LLM]:
    with engine(folder, tensor_parallel_size=2) as started:
        yield started


def test_preempted_requests_are_loaded_again(folder, made, served_folder):
    new = 220
    with engine(folder, num_gpu_blocks_override=9) as small:
        requests = [
            asked(served_folder, made, "broken-page", question) for question in made.questions
        ]
        expected = [made.answer("broken-page", question, new) for question in made.questions]
        assert answers(small, requests, new) == expected
        assert counters(small)["num_preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    [{"policy": "recompute"}, {"model": "gemma3"}, {"folder": "none"}],
    ids=str,
)
def test_an_engine_that_would_fill_pages_wrongly_does_not_start(folder, tmp_path, options):
    options = dict(options)
    if options.get("model"):
        options["model"] = sliding_model(tmp_path)
    where = folder / options.pop("folder", "")
    with pytest.raises((RuntimeError, ValueError)), engine(where, **options):
        pytest.fail("it has started")


def sliding_model(folder: Path) -> str:
    """A tiny random Gemma 3, most of whose layers have a window."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return str(folder)
