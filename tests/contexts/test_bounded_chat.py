# SPDX-License-Identifier: Apache-2.0
"""Chats with a budget: their own turns hold their size, and what others share is not touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import BudgetError, KvfoldError
from kvfold.cache.fork import end_turn, fork, fork_within
from kvfold.store.ragged import RaggedStore
from tests.helpers.budgets import composed, of_one_model
from tests.helpers.chats import QUESTIONS, held, same
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model, state
from tests.helpers.models import build
from tests.helpers.serving import running
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, worst

OWN = 36  # at least the window of `auto`
SMALL = {
    "kivi": "kivi:group=8,residual=8",
    "minicache": "minicache:block=8",
    "merge": "h2o + merge",
    "fair": "snapkv + fair:spans=8/20",
    "chunkwise": "snapkv + chunkwise:length=16",
    "simlayerkv": "simlayerkv:window=32",
    "snapkv_official": "snapkv_official:window=8",
    "snapkv_kvpress": "snapkv_kvpress:window=8",
}
STORES = ["snapkv", "h2o", "adakv", "kvzip", "streaming_llm", SMALL["kivi"], "minicache", "think"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tiny() -> Any:
    return build("llama", vocab_size=12, num_hidden_layers=2, num_attention_heads=2, head_dim=8)


def compressed(model: Any, tokenizer: Any, spec: str) -> kvfold.Context:
    method = kvfold.parse(SMALL.get(spec, spec))
    # Whole layers take all of this preset's budget.
    budget = 1.0 if spec == "d2o_official" else 60
    limit = budget if method.takes_budget else None
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, limit)
    for layer in context.cache.states:
        layer.settle_sinks()  # as the first reader does
    return context


def sizes(cache: kvfold.CompressedCache) -> list[int]:
    """Entries of every layer's KV heads."""
    return [count for layer in cache.stats().kept for row in layer for count in row]


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(3, 12, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, cache: kvfold.CompressedCache) -> Tensor:
    return model(tokens(5, 9), past_key_values=cache, use_cache=True).logits


# --- the size ------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", sorted(name for name in kvfold.list_methods() if not of_one_model(name))
)
def test_two_hundred_turns_hold_their_size_with_every_method(tiny, tokenizer, spec):
    context = compressed(tiny, tokenizer, SMALL.get(spec) or composed(spec))
    before, alone = held(context), logits(tiny, fork(context.cache))
    document = sizes(context.cache)
    reader, ids, nbytes = fork_within(context.cache, OWN), context.ids, []
    for turn in range(200):
        ids = torch.cat([ids, tokens(5 if turn % 7 else 1, turn)], 1)
        end_turn(tiny, reader, ids)
        own = min(ids.shape[1] - context.ids.shape[1], OWN)
        if turn % 20 == 0 or turn == 199:
            assert sizes(reader) == [count + own for count in document]
            nbytes.append(reader.stats().nbytes)
    assert reader.get_seq_length() == ids.shape[1]
    assert nbytes[-1] == nbytes[3]
    # What others read from has not changed by a bit.
    assert same(before, held(context))
    assert torch.equal(logits(tiny, fork(context.cache)), alone)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", STORES)
def test_a_chat_within_a_budget_keeps_the_document_and_so_many_entries(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    before, alone = held(context), context.ask(QUESTION, max_new_tokens=8)
    chat, document = context.chat(budget=OWN), sizes(context.cache)
    for question in QUESTIONS[:10]:
        chat.ask(question, max_new_tokens=4)
        chat.ask(QUESTION, max_new_tokens=3, keep=False)
    assert sizes(chat.reader) == [count + OWN for count in document]
    stats = chat.stats()
    assert (stats.later, stats.later_budget) == (OWN, OWN)
    assert f"{OWN} added after it, whose own budget is {OWN}" in str(stats)
    assert chat.reader.get_seq_length() == chat.ids.shape[1] and chat.turns == 10
    assert same(before, held(context)) and context.ask(QUESTION, max_new_tokens=8) == alone


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gemma3n"])
def test_a_budget_that_is_never_reached_changes_no_answer(tokenizer, family):
    model = new_model(family)
    context = compressed(model, tokenizer, "snapkv")
    free, bounded = context.chat(), context.chat(budget=1000)
    for question in QUESTIONS[:4]:
        answer = free.ask(question, max_new_tokens=5)
        assert bounded.ask(question, max_new_tokens=5) == answer
        aside = free.ask(QUESTION, max_new_tokens=5, keep=False)
        assert bounded.ask(QUESTION, max_new_tokens=5, keep=False) == aside


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gemma3n", "deepseek_v3", "gpt_oss"])
def test_other_architectures_hold_their_size_too(tokenizer, family):
    model = new_model(family)
    context = compressed(model, tokenizer, "h2o")
    chat, document = context.chat(budget=10), sizes(context.cache)
    for question in QUESTIONS[:5]:
        chat.ask(question, max_new_tokens=3)
    assert sizes(chat.reader) == [count + 10 for count in document]


@pytest.mark.parametrize(
    "spec", ["snapkv:window=4", "h2o", "tova", "knorm", "adakv:window=4", "kvzip"]
)
def test_turns_read_what_stays_and_nothing_else(tokenizer, spec):
    """Against transformers' own cache, in which what was evicted is hidden."""
    model = new_model(dtype=torch.float64)
    context = compressed(model, tokenizer, spec)
    assert isinstance(context.cache.states[0].store, RaggedStore) == (
        spec in ("adakv:window=4", "kvzip")
    )
    truth = MaskedDense(copy.deepcopy(model))
    truth(context.ids)
    truth.hide(context.cache)
    reader, ids = fork_within(context.cache, 12), context.ids
    for turn in range(4):
        new = tokens(9, turn)
        ids = torch.cat([ids, new], 1)
        end_turn(model, reader, ids)
        truth(new)
        truth.hide(reader)
    # Each head keeps what it scores highest, not merely the newest.
    newest = list(range(ids.shape[1] - 12, ids.shape[1]))
    kept = [head[head >= context.ids.shape[1]].tolist() for head in reader.positions(0)[0]]
    assert (kept == [newest] * len(kept)) == (spec == "kvzip")
    assert worst(logits(model, reader), truth(tokens(5, 9))) < 1e-9


@pytest.mark.parametrize("method", ["snapkv:window=8", "adakv:window=8", "expected_attention"])
def test_turns_over_a_document_compressed_in_rounds_are_those_without_rounds(
    model, tokenizer, method
):
    answers = []
    for spec in (method, f"{method} + every:interval=4"):
        chat = kvfold.compress(model, tokenizer, DOCUMENT, spec, 60).chat(budget=20)
        answers.append([chat.ask(question, max_new_tokens=6) for question in QUESTIONS[:5]])
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["snapkv:window=8", "adakv:window=8", "kvzip", "sirllm", "rkv + every:interval=4"]
)
def test_the_server_s_conversations_are_those_of_chats_within_a_budget(model, tokenizer, spec):
    with running(model, tokenizer, method=spec, budget=60, chat_budget=12) as server:
        name = server.create(DOCUMENT)
        with server.engine.contexts.reading(name) as context:
            chat, before = context.chat(budget=12), held(context)
            found: list[kvfold.CompressedCache] = []
            stock = server.engine._fork
            server.engine._fork = lambda context: found.append(stock(context)) or found[-1]
            messages: list[dict[str, str]] = []
            for question in QUESTIONS[1:8]:
                messages.append({"role": "user", "content": question})
                said = server.says("", messages=messages, context_id=name, max_tokens=3)
                assert said == chat.ask(question, max_new_tokens=3)
                messages.append({"role": "assistant", "content": said})
            asked = chat.ids.shape[1] - context.ids.shape[1]
            assert asked > 40 and found[-1].stats().later <= 12 + 20
            whole = {"role": "user", "content": f"{DOCUMENT}\n\n{QUESTIONS[1]}"}
            if spec == "kvzip":  # found by its text
                server.says("", messages=[whole], max_tokens=3)
            assert same(before, held(context))


# --- what can go wrong ---------------------------------------------------------------------------


def test_budgets_that_would_not_hold_are_refused(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv:window=8")
    for budget in (0.5, "20%", "2MiB"):
        with pytest.raises(BudgetError, match="a number of tokens"):
            context.chat(budget=budget)
    with pytest.raises(BudgetError, match="at least 8 entries"):
        context.chat(budget=7)
    context.chat(budget="8")


def test_turns_can_be_dropped_until_they_are_compressed(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv:window=8")
    chat = context.chat(budget=30)
    first = chat.ask(QUESTIONS[1], max_new_tokens=3)
    chat.ask(QUESTIONS[2], max_new_tokens=3)
    chat.drop(2)
    assert chat.turns == 0 and torch.equal(chat.ids, context.ids)
    assert chat.ask(QUESTIONS[1], max_new_tokens=3) == first
    for question in QUESTIONS[:8]:
        chat.ask(question, max_new_tokens=3)
    ids = chat.ids
    with pytest.raises(KvfoldError, match="begin another chat"):
        chat.drop()
    assert chat.turns == 9 and torch.equal(chat.ids, ids)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_error_leaves_the_chat_as_it_was(tokenizer, family):
    model = new_model(family)
    context = compressed(model, tokenizer, "snapkv:window=8")
    chats = [context.chat(budget=20) for _ in range(2)]
    for chat in chats:
        for question in QUESTIONS[:6]:
            chat.ask(question, max_new_tokens=3)
    broken, whole = chats
    reader = broken.reader
    with pytest.raises(KvfoldError, match="one answer"):
        broken.ask(QUESTION, num_beams=2)
    layer, calls = model.get_decoder().layers[-1], []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a layer")

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer"):
        broken.ask(QUESTION, max_new_tokens=3)
    hook.remove()
    assert torch.equal(broken.ids, whole.ids) and broken.turns == whole.turns
    assert broken.reader is not reader  # whose layers hold different numbers of tokens
    broken.ask(QUESTION, max_new_tokens=3)
    assert sizes(broken.reader) == sizes(whole.reader)
    with pytest.raises(RuntimeError):  # before anything is read
        whole.ask(QUESTION, max_new_tokens=3, stopping_criteria=[_fails])
    assert whole.ask(QUESTION, max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "adakv:window=8"])
@pytest.mark.parametrize("while_frozen", [True, False], ids=["in the answer", "at the turn's end"])
def test_after_an_error_turns_are_compressed_as_without_it(tokenizer, family, spec, while_frozen):
    model = new_model(family)
    context = compressed(model, tokenizer, spec)
    broken, whole = (context.chat(budget=20) for _ in range(2))
    for chat in (broken, whole):
        chat.add(QUESTION, "blue")  # read together with the next turn
        for question in QUESTIONS[:5]:
            chat.ask(question, max_new_tokens=3)
    assert broken.stats().later == 20
    layer, calls = model.get_decoder().layers[-1], []

    def fail(*_: Any) -> None:
        calls.append(broken.reader.phase.frozen)
        if calls[1:] and calls[-1] == while_frozen:
            raise RuntimeError("a layer")

    hook = layer.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a layer"):
            broken.ask(QUESTION, max_new_tokens=3)
    hook.remove()
    assert broken.stats() == whole.stats() and torch.equal(broken.ids, whole.ids)
    readers = [[state(layer) for layer in chat.reader.states] for chat in (broken, whole)]
    assert same(*readers)
    for question in QUESTIONS[5:8]:
        assert broken.ask(question, max_new_tokens=8) == whole.ask(question, max_new_tokens=8)


@pytest.mark.parametrize("budget", [None, 20])
def test_an_error_before_any_attention_leaves_no_states_behind(tokenizer, budget):
    """Recurrent layers had read the question; those that attend held what they held before."""
    model = new_model("qwen3_5")
    context = compressed(model, tokenizer, "snapkv:window=8")
    broken, whole = (context.chat(budget) if budget else context.chat() for _ in range(2))
    for chat in (broken, whole):
        chat.ask(QUESTIONS[0], max_new_tokens=3)
    hook = model.get_decoder().layers[1].register_forward_pre_hook(_fails)
    with pytest.raises(RuntimeError):
        broken.ask(QUESTION, max_new_tokens=3)
    hook.remove()
    for question in (QUESTION, QUESTIONS[1]):
        expected = whole.ask(question, max_new_tokens=8)
        assert broken.ask(question, max_new_tokens=8) == expected
    assert torch.equal(broken.ids, whole.ids)


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError


# --- what is said --------------------------------------------------------------------------------


def test_stats_tell_a_chat_s_turns_from_the_context(model, tokenizer):
    context = compressed(model, tokenizer, "h2o")
    assert "added after it" not in str(context.stats())
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=6)
    own = chat.reader.get_seq_length() - context.ids.shape[1]
    said = f"of these 60 of the compressed text, {own} added after it, which no budget bounds"
    assert said in str(chat.stats())


def test_stats_tell_what_kvzip_keeps_on_top(model, tokenizer):
    cache = kvfold.CompressedCache(model, "kvzip", 40, tokenizer=tokenizer)
    ids = tokens(100, 1)
    for turn in range(4):
        ids = kvfold.generate(model, ids, cache=cache, max_new_tokens=3, do_sample=False)
        ids = torch.cat([ids, tokens(6, turn)], 1)
    stats = cache.stats()
    assert stats.later == cache.get_seq_length() - 99
    assert f"{stats.later:.0f} added after it, which no budget bounds" in str(stats)
    held_down = kvfold.CompressedCache(model, "h2o", 40)
    kvfold.generate(model, tokens(100, 1), cache=held_down, max_new_tokens=9, do_sample=False)
    assert held_down.stats().later == 0
