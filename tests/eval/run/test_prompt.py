# SPDX-License-Identifier: Apache-2.0
"""How a sample is read and asked about: against transformers alone, and against hand-made ids."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.cache.fork import fork
from kvfold.errors import KvfoldError
from kvfold.eval.run import question_agnostic as agnostic
from kvfold.eval.run import question_aware as aware
from kvfold.eval.run.budgets import compressed
from kvfold.eval.tasks import Question, tasks
from kvfold.generation.generate import read_turn
from tests.helpers.budgets import NAMED, holds, needs_driver
from tests.helpers.evaluation import PLAIN, Setting, contents, equal, record, words
from tests.helpers.models import build

COMPOSED = ["snapkv:window=8 + kivi:group=8,residual=8", "h2o + merge:rule=d2o"]
SIZED = [spec for spec in [*NAMED, *COMPOSED] if kvfold.parse(spec).takes_budget]
BUDGETS = ["0.4", "16", "0.8"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


# --- several budgets from one reading ----------------------------------------------------------


def test_methods_of_every_kind_are_compared():
    assert {"kvzip", "adakv", "h2o", "pyramidkv", "d2o", "random"} <= {
        spec.partition(":")[0] for spec in SIZED
    }
    assert any(needs_driver(spec) for spec in SIZED)


@pytest.mark.parametrize("spec", SIZED)
def test_a_budget_from_a_shared_reading_is_that_of_a_reading_of_its_own(setting, spec):
    sample, forwards = record(count=20), []
    kvfold.CompressedCache(setting.model, "full")  # a model's first cache is tried out
    hook = setting.model.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        shared = {
            each.budget: contents(each.context.cache)
            for each in compressed(setting.model, setting.prompt(sample), spec, BUDGETS, 7)
        }
        together, sizes = len(forwards), set()
        for budget in BUDGETS:
            forwards.clear()
            alone = kvfold.compress(
                setting.model, setting.tokenizer, sample.context, spec, budget, seed=7
            ).cache
            assert equal(shared[budget], contents(alone))
            sizes.add(alone.stats().kept_fraction)
    finally:
        hook.remove()
    assert len(shared) == len(sizes) == 3
    if kvfold.parse(spec).stages().token_pruning is None:
        assert together == len(forwards) > 0


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_sliding_layers_and_latents_get_every_budget_too(setting, family):
    """Latents are compressed inside the forward: each budget reads for itself."""
    model, sample, spec = build(family, vocab_size=2048), record(), "snapkv:window=8"
    found = list(compressed(model, setting.prompt(sample), spec, ["20", "12345B"], 0))
    assert len(found) == 2
    for each in found:
        alone = kvfold.compress(model, setting.tokenizer, sample.context, spec, each.budget)
        assert equal(contents(each.context.cache), contents(alone.cache))
        assert alone.stats().kept_fraction < 1
        # Samples bring what parts a question from the context.
        said = each.context.ask("\n\nSo?", max_new_tokens=5)
        assert said == alone.ask("So?", max_new_tokens=5)


def test_what_compresses_while_it_answers_cannot_be_asked_several_questions(setting):
    spec = "simlayerkv:window=8,when=first_decode"
    assert "first generated token" in setting.error(record(), spec)
    assert setting.outcome(record(), spec, question_aware=True).answers[0].tokens == 6


def test_another_budget_is_only_taken_while_the_first_turn_is_read(setting):
    ids = setting.ids(words(20))
    cache = kvfold.CompressedCache(setting.model, "snapkv:window=8", 0.5)
    with pytest.raises(KvfoldError, match="first turn"):
        cache.to_budget(0.2)
    with cache.reading():
        read(setting.model, cache, ids)
        small = cache.to_budget(16)
        assert small.stats().kept[0][0] == [16, 16]
        assert cache.stats().kept[0][0] == [ids.shape[1]] * 2
    assert cache.stats().kept[0][0] == [ids.shape[1] // 2] * 2
    assert str(cache.budget) != str(small.budget)
    with cache.reading(), pytest.raises(KvfoldError, match="first turn"):
        cache.to_budget(0.2)


@torch.no_grad()
def read(model: Any, cache: kvfold.CompressedCache, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache, use_cache=True).logits


# --- before any question exists, and with it ---------------------------------------------------


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Every context that is asked about, and a copy of what it held before."""
    found: list[tuple[Any, Any]] = []
    real = agnostic.compressed

    def watching(*arguments: Any) -> Any:
        for each in real(*arguments):
            # Sinks that move come to rest when the first reader does.
            fork(each.context.cache)
            found.append((each.context.cache, contents(each.context.cache)))
            yield each

    monkeypatch.setattr(agnostic, "compressed", watching)
    return found


@pytest.mark.parametrize(
    "spec", ["snapkv:window=8", "adakv:window=8", "h2o", "streaming_llm", "kvzip", COMPOSED[0]]
)
def test_questions_leave_the_compressed_context_as_it_was(setting, spec, monkeypatch):
    found, said = watched(monkeypatch), []
    sample = record("shared_kv", questions=2)
    backwards = replace(sample, questions=sample.questions[::-1])
    for each in (sample, backwards):
        said.append([a.prediction for a in setting.outcome(each, spec, "0.5").answers])
    (first, before), (second, again) = found
    assert equal(before, contents(first))
    assert equal(before, again) and equal(again, contents(second))
    assert said[0] == said[1][::-1] and said[0][0] != said[0][1]


@pytest.mark.slow
def test_a_question_that_is_compressed_with_its_context_keeps_other_entries(monkeypatch):
    model, tokenizer = kvfold.bundled_model()
    made: list[kvfold.CompressedCache] = []

    def making(*arguments: Any, **options: Any) -> kvfold.CompressedCache:
        made.append(kvfold.CompressedCache(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(aware, "CompressedCache", making)
    found = watched(monkeypatch)
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 6
    numbers = {"quick-table": 1234567, "old-river": 7654321}
    needles = [f"One of the special magic numbers for {k} is: {n}. " for k, n in numbers.items()]
    context = f"{noise}{needles[0]}{noise}{needles[1]}{noise}"
    setting, kept = Setting(model, model, tokenizer), []
    for key in numbers:
        question = Question(f"\nThe special magic number for {key}?", ("1",), 2, "", PLAIN)
        sample = replace(record("niah_magic", context=context), questions=(question,))
        setting.outcome(sample, "snapkv:window=16", "0.1", question_aware=True)
        prompt = setting.prompt(sample)
        ids = torch.cat([prompt.ids, prompt.question_ids(question)], 1)
        alone = kvfold.CompressedCache(model, "snapkv:window=16", 0.1)
        read_turn(model, alone, ids, None, ids.shape[1], ids.shape[1])
        # What was generated comes on top.
        kept.append(positions(made[-1], ids.shape[1]))
        assert kept[-1] == positions(alone, ids.shape[1])
        setting.outcome(sample, "snapkv:window=16", "0.1")
    assert kept[0] != kept[1]
    assert equal(found[0][1], found[1][1])


def positions(cache: kvfold.CompressedCache, length: int) -> list[list[list[int]]]:
    """Kept positions before `length`, of each layer's heads."""
    layers = range(len(cache.states))
    return [[head[head < length].tolist() for head in cache.positions(i)[0]] for i in layers]


# --- contexts that are too long ----------------------------------------------------------------


def cut_in_the_middle(ids: Tensor, limit: int) -> list[int]:
    """LongBench's: `pred.py` keeps half of what fits from either end."""
    half = limit // 2
    return ids[0, :half].tolist() + ids[0, ids.shape[1] - (limit - half) :].tolist()


@pytest.mark.parametrize("limit", [60, 61, 90, 127])
def test_the_middle_is_cut_as_on_the_whole_prompts_tokens(setting, limit):
    sample = record("longbench_qasper", count=40, new=6)
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    whole = torch.cat([prompt.ids, asked], 1)
    assert asked.shape[1] < limit // 2 and whole.shape[1] > 127
    shorter = prompt.within(limit + 6, "middle")
    read = torch.cat([shorter.ids, asked], 1)
    assert read.tolist() == [cut_in_the_middle(whole, limit)]
    assert shorter.left_out == whole.shape[1] - limit
    outcome = setting.outcome(sample, max_length=limit + 6)
    assert outcome.answers[0].prediction == setting.text(setting.greedy(read, 6))
    assert (outcome.tokens, outcome.left_out) == (limit, shorter.left_out)
    assert outcome.held.seen == shorter.ids.shape[1]


def test_what_just_fits_is_not_cut_and_a_header_never_is(setting):
    sample = record("longbench_qasper")
    prompt = setting.prompt(sample)
    fits = prompt.ids.shape[1] + prompt.tokens_after()[1]
    assert prompt.within(fits, "middle") is prompt
    assert prompt.within(fits - 1, "middle").left_out == 1
    header = setting.ids(prompt.frame.before)
    assert prompt.opening == header.shape[1] > 0
    for room in (0, 1, prompt.opening, prompt.opening + 1):
        kept = prompt.truncated(room).ids
        assert kept.shape[1] == max(room, prompt.opening)
        assert torch.equal(kept[:, : prompt.opening], header)
    with pytest.raises(KvfoldError, match="a question takes"):
        prompt.within(prompt.tokens_after()[1] + prompt.opening, "middle")


def test_the_longest_question_and_every_turn_must_fit(setting):
    asked = [Question(words(n), (), new) for n, new in ((4, 2), (9, 5), (6, 9))]
    sizes = [setting.prompt(record()).question_ids(q).shape[1] for q in asked]
    news = [q.max_new_tokens for q in asked]
    single = replace(record("shared_kv"), questions=tuple(asked))
    most = max(zip(sizes, news, strict=True), key=sum)
    assert setting.prompt(single).tokens_after() == (most[0], sum(most))
    turns = replace(single, conversation=True)
    assert setting.prompt(turns).tokens_after() == (sum(sizes), sum(sizes) + sum(news))


def test_a_generated_sample_is_never_cut(setting):
    sample = record("kv_retrieval")
    prompt = setting.prompt(sample)
    takes = prompt.ids.shape[1] + prompt.tokens_after()[1]
    said = setting.error(sample, max_length=takes - 1)
    assert f"takes {takes} tokens" in said and f"{takes - 1} are the limit" in said
    assert setting.outcome(sample, max_length=takes).left_out == 0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("budget", ["0.3", "31", "9216B"])
def test_the_cut_baseline_is_a_plain_cache_on_what_the_budget_pays_for(setting, budget, together):
    sample = record("kv_retrieval")
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    count, after = prompt.ids.shape[1], asked.shape[1] if together else 0
    # A token takes keys and values of 3 layers, 2 heads and 8 numbers of 4 bytes.
    paid = {
        "0.3": math.floor(0.3 * (count + after)),
        "31": 31,
        "9216B": 9216 // (2 * 3 * 2 * 8 * 4),
    }
    room = paid[budget] - after
    assert prompt.opening < room < count
    head = room // 2
    kept = torch.cat([prompt.ids[:, :head], prompt.ids[:, count - (room - head) :]], 1)
    outcome = setting.outcome(sample, "cut", budget, question_aware=together)
    answer = setting.greedy(torch.cat([kept, asked], 1), 6)
    assert outcome.answers[0].prediction == setting.text(answer)
    # The sample is whole; what was left away is the method's doing.
    assert (outcome.tokens, outcome.left_out) == (count + asked.shape[1], 0)
    generated = after + 5 if together else 0
    assert outcome.held.seen == count + generated
    assert outcome.held.kept == pytest.approx((room + generated) / (count + generated))
    assert outcome.held.nbytes_full == (count + generated) * 2 * 3 * 2 * 8 * 4


# --- how likely a text is ----------------------------------------------------------------------


@torch.no_grad()
def surprise(setting: Setting, ids: Tensor, allowed: Tensor | None = None) -> Tensor:
    """−log p of every token but the first, from one forward; `allowed [N, N]` are seen by each."""
    mask = None
    if allowed is not None:
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
    logits = setting.plain(ids, attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


def book(task: str, **fields: Any) -> Any:
    return record(task, 0, chat=False, count=25, **fields)


def test_a_streamed_text_through_the_full_cache_is_one_plain_forward(setting):
    sample = book("perplexity")
    prompt = setting.prompt(sample)
    (answer,) = setting.outcome(sample).answers
    expected = surprise(setting, prompt.ids)
    assert answer.nll == pytest.approx(float(expected.mean()), abs=1e-4)
    assert answer.tokens == answer.weight == len(expected) == prompt.ids.shape[1] - 1


@pytest.mark.parametrize("budget", ["12", "0.25"])
def test_a_stream_that_evicts_sees_sinks_and_the_most_recent(setting, budget):
    sample = book("perplexity")
    ids = setting.prompt(sample).ids
    count = ids.shape[1]
    room = 12 if budget == "12" else count // 4
    query, key = torch.arange(count)[:, None], torch.arange(count)
    # Before token t there are `room` entries: 4 sinks, the others the last before t.
    allowed = (key <= query) & ((key < 4) | (key >= query - (room - 4)))
    outcome = setting.outcome(sample, "streaming_llm_original", budget)
    expected = float(surprise(setting, ids, allowed).mean())
    assert outcome.answers[0].nll == pytest.approx(expected, abs=1e-4)
    assert abs(expected - float(surprise(setting, ids).mean())) > 1e-2
    assert outcome.held.kept == pytest.approx(room / (count - 1))


def test_a_continuation_is_scored_after_what_was_compressed(setting):
    sample = replace(book("continuation"), questions=(Question(" and so " + words(12), (), 0),))
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    whole = surprise(setting, torch.cat([prompt.ids, asked], 1))
    full, small = (
        setting.outcome(sample, *how).answers[0] for how in ((), ("streaming_llm_original", "0.2"))
    )
    expected = float(whole[prompt.ids.shape[1] :].mean())
    assert full.nll == pytest.approx(expected, abs=1e-4)
    assert full.tokens == small.tokens == asked.shape[1] - 1
    count, room = prompt.ids.shape[1], prompt.ids.shape[1] // 5
    ids = torch.cat([prompt.ids, asked], 1)
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    gone = (key >= 4) & (key < count - (room - 4)) & (query >= count)
    expected = float(surprise(setting, ids, (key <= query) & ~gone)[count:].mean())
    assert small.nll == pytest.approx(expected, abs=1e-4)
    assert abs(small.nll - full.nll) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "random", "kvzip"])
def test_a_method_that_only_compresses_prompts_says_that_it_kept_a_whole_stream(setting, spec):
    outcome = setting.outcome(book("perplexity"), spec, "16")
    assert outcome.held.kept == 1 and set(outcome.held.kept_per_layer) == {1}
    assert outcome.answers == setting.outcome(book("perplexity")).answers


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in NAMED if holds(spec)])
def test_a_method_that_holds_its_size_is_streamed_at_its_budget(setting, spec):
    sample = book("perplexity")
    outcome = setting.outcome(sample, spec, "16")
    assert outcome.held.kept == pytest.approx(16 / outcome.held.seen)


def test_a_text_without_numbers_for_probabilities_is_an_error(setting, monkeypatch):
    head = setting.model.lm_head
    monkeypatch.setattr(head, "forward", lambda x: x.new_full((*x.shape[:2], 2048), math.nan))
    assert "nan" in setting.error(book("perplexity"))


def test_one_budget_that_is_too_small_leaves_the_others(setting):
    for budgets in (["4", "20"], ["20", "4"]):
        cells = [setting.cell("kv_retrieval", "snapkv:window=8", budget) for budget in budgets]
        found = {sample.cell.budget: sample for sample in setting.run(record(), *cells)}
        assert "raise it to at least 8" in found["4"].error
        assert found["20"].outcome.held.kept == pytest.approx(20 / found["20"].outcome.held.seen)


def test_what_cannot_be_read_as_a_stream_says_so(setting):
    sample = book("perplexity")
    length = setting.prompt(sample).ids.shape[1]
    assert f"takes {length} tokens" in setting.error(sample, max_length=length - 1)
    halves = replace(book("continuation"), questions=(Question(words(5), (), 0),))
    assert "cannot be scored" in setting.error(halves, question_aware=True)


# --- conversations -----------------------------------------------------------------------------


def transcript(setting: Setting, sample: Any, first: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens before each of two answers, of which the first is given."""
    frame, (one, two) = setting.prompt(sample).frame, sample.questions
    opening = f"{frame.before}{sample.context}"
    asked = [f"{q.text}{frame.after}{q.answer_prefix}" for q in (one, two)]
    before = torch.cat([setting.ids(opening), setting.ids(asked[0])], 1)
    return before, torch.cat(
        [before, torch.tensor([first]), setting.ids(frame.between + asked[1])], 1
    )


@pytest.mark.parametrize("history", ["own", "gold"])
def test_a_second_turn_sees_the_first_answer(setting, history):
    sample = record("conversation_kv", 2, conversation=True)
    before, _ = transcript(setting, sample, [])
    own = setting.greedy(before, 6)
    (right,) = sample.questions[0].answers
    said = own if history == "own" else setting.ids(right)[0].tolist()
    _, after = transcript(setting, sample, said)
    answers = setting.outcome(sample, history=history).answers
    assert [a.prediction for a in answers] == [
        setting.text(own),
        setting.text(setting.greedy(after, 6)),
    ]
    other = "gold" if history == "own" else "own"
    assert setting.outcome(sample, history=other).answers[1] != answers[1]
    alone = setting.outcome(replace(sample, conversation=False)).answers
    assert alone[0] == answers[0] and alone[1] != answers[1]


@pytest.mark.parametrize("ends", [False, True])
def test_two_turns_while_decoding_go_on_with_one_compressed_cache(setting, ends, monkeypatch):
    sample = record("mt_bench", 2, conversation=True, context="")
    before, _ = transcript(setting, sample, [])
    first = setting.greedy(before, 6)
    said = first
    if ends:
        # The first answer ends with its third token, which the template brings again.
        end = first[2]
        assert end not in first[:2]
        for model in (setting.model, setting.plain):
            monkeypatch.setattr(model.generation_config, "eos_token_id", end)
        said = first[:2]
    _, after = transcript(setting, sample, said)
    second = setting.greedy(after, 6)
    full = setting.outcome(sample)
    assert full.answers[0].ended == ("end" if ends else "limit")
    assert full.answers[0].tokens == (3 if ends else 6)
    assert [a.prediction for a in full.answers] == [
        setting.text(first[:3] if ends else first),
        setting.text(second),
    ]
    assert full.answers[0].scores == {}
    # The last token was not read any more.
    assert full.held.seen == after.shape[1] + len(second) - 1
    small = setting.outcome(sample, "snapkv:window=8", "12")
    spoken = sum(answer.tokens - (answer.ended == "end") for answer in small.answers)
    _, asked = transcript(setting, sample, [])
    # What ended the last answer, or its last token, was not read any more.
    last = small.answers[1].ended == "limit"
    assert small.held.seen == asked.shape[1] + spoken - last
    assert small.held.kept < 0.8 and small.answers[1] != full.answers[1]
    assert "own answers" in setting.error(sample, history="gold")


def test_a_task_of_decoding_is_compressed_with_its_question_whatever_was_asked(setting):
    assert {tasks()[name].phase for name in ("gsm8k", "math500", "mt_bench")} == {"decode"}
    sample = record("gsm8k", context="")
    for protocol in (False, True):
        outcome = setting.outcome(sample, "snapkv:window=8", "12", question_aware=protocol)
        read = setting.prompt(sample).ids.shape[1] + outcome.answers[0].tokens - 1
        assert outcome.held.seen > read


@pytest.mark.parametrize("question_aware", [False, True])
def test_an_answer_that_must_not_be_empty_does_not_begin_with_a_stop_string(
    setting, question_aware
):
    """LongBench's samsum: `min_length` forbids an end or a line break as the first token only."""
    sample = record(new=4, chat=False)
    prompt = setting.prompt(sample)
    ids = torch.cat([prompt.ids, prompt.question_ids(sample.questions[0])], 1)
    (first,) = setting.greedy(ids, 1)
    mask = torch.ones_like(ids)
    expected = setting.plain.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=4,
        min_length=ids.shape[1] + 1, eos_token_id=[first],
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    stopped = replace(sample, stop=(setting.text([first]),))
    how = {"question_aware": question_aware}
    assert setting.outcome(stopped, **how).answers[0].prediction == ""
    full = setting.outcome(replace(stopped, nonempty=True), **how).answers[0]
    said = setting.text([token for token in expected if token != first])
    assert full.prediction == said != ""


@pytest.mark.parametrize("question_aware", [False, True])
def test_what_a_benchmark_spells_like_a_special_token_is_text(setting, question_aware):
    sample, control = record(), "<|assistant|>"
    asked = replace(sample.questions[0], text=f"{sample.questions[0].text}{control} So?")
    prompt = setting.prompt(replace(sample, context=f"{control}{sample.context}"))
    number = setting.tokenizer.convert_tokens_to_ids(control)
    assert number in setting.ids(control)
    assert number not in prompt.ids
    # The one of the chat template itself.
    assert (prompt.question_ids(asked) == number).sum() == 1
    spelled = replace(sample, context=f"{control}{sample.context}", questions=(asked,))
    assert (
        setting.outcome(spelled, question_aware=question_aware).tokens
        == prompt.ids.shape[1] + (prompt.question_ids(asked).shape[1])
    )
