# SPDX-License-Identifier: Apache-2.0
"""Questions to one context: side by side, one after the other, piece by piece."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.cache.fork import fork
from kvfold.contexts.answer import AnswerStream
from kvfold.hf.chat_template import PromptFrame
from kvfold.store.shared_buffer import SharedBuffer
from tests.helpers.chats import QUESTIONS, TEMPLATE, held, same, storages
from tests.helpers.contexts import DOCUMENT, KINDS, KIVI, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer

EVERY = pytest.mark.parametrize("spec", KINDS)


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def compressed(model: Any, tokenizer: Any, spec: str, text: str = DOCUMENT) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, text, spec, KINDS[spec][0])


def reachable(*caches: kvfold.CompressedCache) -> int:
    return sum(storages([cache.layers for cache in caches], {}, set()).values())


# --- shared storage ------------------------------------------------------------------------------


@EVERY
def test_a_reader_gives_the_logits_that_the_cache_itself_would(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    reader = fork(context.cache)
    ids = torch.randint(3, 12, (1, 20), generator=torch.Generator().manual_seed(1))
    pieces = (ids[:, :12], *ids[:, 12:].split(1, 1))
    for _ in range(2):
        with torch.no_grad():
            theirs = [model(p, past_key_values=reader, use_cache=True).logits for p in pieces]
        reader.crop(-20)
        with torch.no_grad(), context.cache.frozen():
            own = [model(p, past_key_values=context.cache, use_cache=True).logits for p in pieces]
        context.cache.crop(-20)
        for one, other in zip(theirs, own, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert [p.tolist() for p in reader.positions(0)[0]] == [
        p.tolist() for p in context.cache.positions(0)[0]
    ]


@pytest.mark.slow
@EVERY
def test_a_hundred_readers_cost_one_context_and_a_hundred_tails(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec, " ".join([DOCUMENT] * 6))
    alone = reachable(context.cache)
    readers = [fork(context.cache) for _ in range(100)]
    question = torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        for reader in readers:
            model(question, past_key_values=reader, use_cache=True)
    together = reachable(context.cache, *readers)
    shapes = [layer.keys.shape for layer in context.cache.compressed_layers]
    entry = sum(2 * 4 * shape[1] * shape[3] for shape in shapes)
    # Beside its five tokens a reader has room for 16 more, and positions of what it holds.
    tail = entry * (5 + 16) * 1.3
    assert alone < together < alone + 100 * tail
    assert all(reader.get_seq_length() == context.stats().seen + 5 for reader in readers)


@pytest.mark.slow
def test_readers_leave_the_context_alone(model, tokenizer):
    for spec in KINDS:
        context = compressed(model, tokenizer, spec)
        for layer in context.cache.states:
            layer.settle_sinks()
        before, stats = held(context), context.stats()
        chat = context.chat()
        chat.ask(QUESTION, max_new_tokens=30)
        chat.ask(QUESTION, max_new_tokens=3, keep=False)
        chat.drop()
        context.ask(QUESTION, max_new_tokens=8)
        assert same(before, held(context)) and context.stats() == stats


def test_a_reader_cannot_go_back_before_its_beginning(model, tokenizer):
    reader = fork(compressed(model, tokenizer, "snapkv").cache)
    with torch.no_grad():
        model(torch.tensor([[4, 5]]), past_key_values=reader, use_cache=True)
    with pytest.raises(KvfoldError, match="cannot take back 3 tokens"):
        reader.crop(-3)
    reader.crop(-2)


def test_a_reader_belongs_to_the_model_of_its_context(model, tokenizer):
    reader = fork(compressed(model, tokenizer, "snapkv").cache)
    other = new_model()
    kvfold.enable(other)
    with pytest.raises(kvfold.UnsupportedModel, match="made for another model"), torch.no_grad():
        other(torch.tensor([[4, 5]]), past_key_values=reader, use_cache=True)


def test_a_context_whose_cache_was_used_answers_nothing(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    with torch.no_grad():
        model(torch.tensor([[4, 5]]), past_key_values=context.cache, use_cache=True)
    with pytest.raises(KvfoldError, match="leave its cache alone"):
        context.ask(QUESTION)


def test_a_reader_evicts_nothing(model, tokenizer):
    context = compressed(model, tokenizer, "h2o")
    reader = fork(context.cache)
    with torch.no_grad(), reader.reading():
        model(torch.randint(3, 12, (1, 90)), past_key_values=reader, use_cache=True)
    kept = context.stats().kept[0][0][0]
    assert reader.stats().kept[0][0][0] == kept + 90
    assert reader.stats().seen == context.stats().seen + 90


def test_rows_of_a_reader_multiply(model, tokenizer):
    for spec in ("snapkv", "adakv"):
        context = compressed(model, tokenizer, spec)
        before, reader = held(context), fork(context.cache)
        reader.batch_repeat_interleave(2)
        ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
        with torch.no_grad():
            both = model(ids, past_key_values=reader, use_cache=True).logits
            for row in range(2):
                alone = model(ids[row : row + 1], past_key_values=fork(context.cache)).logits
                torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-5)
        assert same(before, held(context))


def test_a_branch_goes_on_from_its_trunk():
    trunk = torch.arange(24.0).view(1, 2, 4, 3)
    branch = SharedBuffer(trunk)
    assert branch.rows is trunk and branch.length == 4
    more = -torch.ones(1, 2, 2, 3)
    branch.append(more)
    assert torch.equal(branch.rows, torch.cat([trunk, more], 2)) and branch.length == 6
    room = branch.reserve(5)
    assert room.shape[2] == 11 and torch.equal(room[:, :, :6], branch.rows)
    assert not room[:, :, 6:].any()
    assert branch.nbytes()[0] == 4 * (24 + 12)
    branch.crop(1)
    branch.index(lambda rows: rows.repeat_interleave(2, 0))
    assert branch.rows.shape == (2, 2, 5, 3) and trunk.shape == (1, 2, 4, 3)
    branch.crop(1)
    assert torch.equal(branch.rows[1], trunk[0])


# --- side by side --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, "minicache", "streaming_llm"])
def test_threads_get_the_answers_they_would_get_alone(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    alone = [context.ask(question, max_new_tokens=8) for question in QUESTIONS]
    fresh = compressed(model, tokenizer, spec)
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(lambda q: fresh.ask(q, max_new_tokens=8), QUESTIONS * 2)
        streamed = pool.map(lambda q: "".join(fresh.stream(q, max_new_tokens=8)), QUESTIONS)
        assert list(asked) == alone * 2
        assert [text.strip() for text in streamed] == alone
    assert len(set(alone)) > 3


def test_chats_of_one_context_do_not_see_each_other(model, tokenizer):
    context = compressed(model, tokenizer, "adakv")
    lone = context.chat()
    alone = [lone.ask(question, max_new_tokens=6) for question in QUESTIONS[:3]]
    one, other = context.chat(), context.chat()
    found = []
    for question in QUESTIONS[:3]:
        found.append(one.ask(question, max_new_tokens=6))
        other.ask(question[::-1], max_new_tokens=9)
    assert found == alone


# --- turns ---------------------------------------------------------------------------------------


def expected(context: kvfold.Context, text: str, count: int) -> str:
    """The greedy answer to a whole conversation that is read at once."""
    reader, tokenizer = fork(context.cache), context.tokenizer
    new = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    ids = torch.cat([context.ids, new], 1)
    out = context.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=reader,
        max_new_tokens=count,
        do_sample=False,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_turns_that_are_kept_are_seen_and_others_are_not(tokenizer, family):
    model = new_model(family)
    context = compressed(model, tokenizer, "snapkv")
    one, two, three = QUESTIONS[1:4]
    chat = context.chat()
    first = chat.ask(one, max_new_tokens=5)
    assert first == expected(context, f"\n\n{one}\n", 5) == context.ask(one, max_new_tokens=5)
    conversation = f"\n\n{one}\n{first}\n\n"
    aside = chat.ask(three, keep=False, max_new_tokens=5)
    assert aside == expected(context, f"{conversation}{three}\n", 5)
    second = chat.ask(two, max_new_tokens=5)
    assert second == expected(context, f"{conversation}{two}\n", 5)
    assert chat.turns == 2
    chat.drop()
    assert chat.ask(three, max_new_tokens=5) == aside and chat.turns == 2
    chat.drop(2)
    assert chat.turns == 0 and torch.equal(chat.ids, context.ids)
    assert chat.ask(two, max_new_tokens=5) == context.ask(two, max_new_tokens=5)
    with pytest.raises(KvfoldError, match="2 turns cannot be dropped of 1"):
        chat.drop(2)


def test_a_template_stands_between_turns(model):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    frame = PromptFrame.of(tokenizer)
    assert frame == PromptFrame("<user> ", " </s> <assistant> ", " </s> <user> ")
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert PromptFrame.of(tokenizer) == PromptFrame("", "!", None)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=2)
    with pytest.raises(KvfoldError, match="no second turn"):
        chat.ask(QUESTION, max_new_tokens=2)


def test_the_token_that_ends_an_answer_comes_once(tokenizer):
    model = new_model()
    context = compressed(model, tokenizer, "snapkv")
    free = context.ask(QUESTION, max_new_tokens=8).split()
    end = tokenizer.convert_tokens_to_ids(free[3])
    model.generation_config.eos_token_id = [end]
    chat = context.chat()
    before = chat.ids.shape[1]
    answer = chat.ask(QUESTION, max_new_tokens=8).split()
    assert answer == free[: free.index(free[3]) + 1]
    asked = len(tokenizer(f"\n\n{QUESTION}\n", add_special_tokens=False).input_ids)
    assert chat.ids.shape[1] == before + asked + len(answer) - 1
    assert chat.reader.get_seq_length() == chat.ids.shape[1]


def test_what_begins_the_answer_is_not_part_of_it_but_of_the_turn(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    chat = context.chat()
    first = chat.ask(QUESTION, answer_prefix="we go", max_new_tokens=4)
    assert first == expected(context, f"\n\n{QUESTION}\nwe go", 4)
    second = chat.ask(QUESTION, max_new_tokens=4)
    assert second == expected(context, f"\n\n{QUESTION}\nwe go {first}\n\n{QUESTION}\n", 4)


# --- stop strings, streaming, sampling -----------------------------------------------------------


@pytest.mark.parametrize("spec", ["snapkv", "adakv"])
def test_an_answer_ends_before_a_stop_string(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    free = context.ask(QUESTION, max_new_tokens=12)
    stop = " ".join(free.split()[4:6])
    cut = free[: free.index(stop)]
    assert context.ask(QUESTION, max_new_tokens=12, stop=stop) == cut.strip()
    assert context.ask(QUESTION, max_new_tokens=12, stop=["nothing", stop]) == cut.strip()
    pieces = list(context.stream(QUESTION, max_new_tokens=12, stop=[stop]))
    assert "".join(pieces) == cut
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=12, stop=stop)
    second = chat.ask(QUESTION, max_new_tokens=4)
    assert second == expected(context, f"\n\n{QUESTION}\n{cut}\n\n{QUESTION}\n", 4)


class Letters:
    """A tokenizer of bytes, of which several make a character."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def pieces_of(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], AnswerStream, list[int]]:
    """What is shown after each byte of a text, the answer, and the tokens that make it up."""
    shown: list[str] = []
    data = list(text.encode())
    answer = AnswerStream(Letters(), 1, stop, shown.append, Event())  # type: ignore[arg-type]
    for end in range(1, len(data) + 1):
        if bool(answer(torch.tensor([[0, *data[:end]]]), None)):
            data = data[:end]
            break
    return shown, answer, answer.finish(data)


def test_pieces_are_whole_characters():
    shown, answer, tokens = pieces_of("aé€b")
    assert shown == ["a", "é", "€", "b"] and answer.text == "aé€b"
    assert bytes(tokens).decode() == "aé€b"


def test_words_around_a_token_without_text_stay_apart(tokenizer):
    tokens = tokenizer.convert_tokens_to_ids(
        ["the", "<pad>", "sky", "is", "<pad>", "<bos>", "blue"]
    )
    shown: list[str] = []
    answer = AnswerStream(tokenizer, 0, (), shown.append, Event())
    for end in range(1, len(tokens) + 1):
        answer(torch.tensor([tokens[:end]]), None)
    assert "".join(shown) == "the sky is blue"


def test_pieces_of_a_real_tokenizer_make_up_the_text():
    _, tokenizer = kvfold.bundled_model()
    text = "The number is 2590996, said Zoë — naïve café owners; 你好!\n\nReally?"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    shown: list[str] = []
    answer = AnswerStream(tokenizer, 0, (), shown.append, Event())
    for end in range(1, len(tokens) + 1):
        answer(torch.tensor([tokens[:end]]), None)
    answer.finish(tokens)
    assert "".join(shown) == answer.text == tokenizer.decode(tokens)
    assert len(shown) > 10


def test_half_a_character_at_the_end_is_shown_as_such():
    shown: list[str] = []
    answer = AnswerStream(Letters(), 0, (), shown.append, Event())  # type: ignore[arg-type]
    answer(torch.tensor([[97, 0xC3]]), None)
    assert shown == []
    answer.finish([97, 0xC3])
    assert "".join(shown) == answer.text == "a\ufffd"


def test_what_may_begin_a_stop_string_is_held_back():
    shown, answer, tokens = pieces_of("one two END three", ("END",))
    assert "".join(shown) == answer.text == "one two " and answer.stopped
    assert bytes(tokens).decode() == "one two "
    shown, answer, _ = pieces_of("an EN and an E", ("END", ""))
    assert "".join(shown) == answer.text == "an EN and an E" and not answer.stopped
    assert "E" not in shown[:-1] and "EN " in shown
    shown, answer, _ = pieces_of("abcabd", ("abd", "cab"))
    assert answer.text == "ab"


def test_a_stream_that_is_closed_ends_the_answer(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    chat = context.chat()
    pieces = chat.stream(QUESTION, max_new_tokens=3000)
    next(pieces)
    pieces.close()
    assert chat.turns == 0 and torch.equal(chat.ids, context.ids)
    assert chat.reader.get_seq_length() == context.stats().seen
    free = context.ask(QUESTION, max_new_tokens=5)
    assert chat.ask(QUESTION, max_new_tokens=5) == free


def test_an_error_in_a_stream_reaches_who_reads_it(model, tokenizer, monkeypatch):
    chat = compressed(model, tokenizer, "adakv").chat()
    good = chat.ask(QUESTION, max_new_tokens=4, keep=False)
    layer = model.model.layers[2]
    whole, calls = layer.forward, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return whole(*args, **options)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(chat.stream(QUESTION, max_new_tokens=8))
    monkeypatch.undo()
    assert chat.turns == 0 and chat.ask(QUESTION, max_new_tokens=4) == good


def test_sampling_takes_the_options_of_generate(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 10}
    torch.manual_seed(1)
    answers = [context.ask(QUESTION, **options) for _ in range(3)]
    torch.manual_seed(1)
    assert context.ask(QUESTION, **options) == answers[0]
    assert len(set(answers)) > 1
    with pytest.raises(KvfoldError, match="a question has one answer"):
        context.ask(QUESTION, num_beams=2)


def test_penalties_see_the_document(model, tokenizer):
    document = " ".join(["the", "grass", "is"] * 20)
    context = kvfold.compress(model, tokenizer, document, "snapkv", 40)
    answer = context.ask("here", max_new_tokens=5, no_repeat_ngram_size=1)
    assert set(answer.split()) <= {"green", "sky", "blue", "we", "go"}
