# SPDX-License-Identifier: Apache-2.0
"""Sessions: what is read once, what is kept, and what edits by id do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError, Message
from kvfold.contexts.files.format import read_header
from kvfold.contexts.session import QUEUED, SLACK, Session
from kvfold.errors import BudgetError, ContextFileError
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model, rewritten
from tests.helpers.tokenizers import word_tokenizer

WORDS = DOCUMENT.split()


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture
def new(model: Any, tokenizer: Any) -> Any:
    def begin(method: str = "knorm", budget: int = 60, **options: Any) -> Session:
        return kvfold.begin_session(
            model, tokenizer, " ".join(WORDS[:20]), method, budget, **options
        )

    return begin


def text(turn: int, words: int = 10) -> str:
    return " ".join(WORDS[(turn * 7 + i) % len(WORDS)] for i in range(words))


def whole(session: Session) -> kvfold.Context:
    """The session's tokens, read at once by a full cache."""
    cache = kvfold.CompressedCache(session.context.model, "full")
    session.context.model(session.ids, past_key_values=cache)
    return cache


@pytest.mark.slow
def test_turns_within_the_budget_equal_a_chat_over_the_same_opening(model, tokenizer, new):
    session = new("snapkv:window=4", 2000)
    chat = kvfold.compress(model, tokenizer, " ".join(WORDS[:20]), "full").chat()
    for turn in range(3):
        reply = session.ask(text(turn), max_new_tokens=5)
        assert reply.text.strip() == chat.ask(text(turn), max_new_tokens=5)
    assert torch.equal(session.ids, chat.ids)
    assert session.record.compactions == 0 and session.stats().kept_fraction == 1


@pytest.mark.slow
def test_each_token_is_read_once(model, new):
    kvfold.CompressedCache(model, "knorm", 0.5)  # a model is tried out before its first cache
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        session = new()
        for turn in range(12):
            session.ask(text(turn, 12), max_new_tokens=6)
    finally:
        hook.remove()
    assert sum(read) == session.ids.shape[1]
    assert session.record.compactions > 1 and session.record.turns == 12


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("method", ["knorm", "snapkv:window=4", "h2o", "adakv:window=4"])
def test_entries_stay_within_budget_and_slack(new, method):
    session = new(method, 60)
    opening = session.ids.shape[1]
    for turn in range(12):
        session.ask(text(turn, 12), max_new_tokens=6)
        # A turn that compacts leaves the budget, its last token and the answer.
        assert session.stats().mean_kept <= max(60 * (1 + SLACK), 60 + 1 + 6)
    # The instructions stay, whatever the scores.
    for state in session.cache.states:
        at = state.positions()
        assert all(set(range(opening)) <= set(head.tolist()) for head in at[0])


def test_entries_are_the_same_between_compactions(new):
    session = new("knorm", 200)
    session.ask(text(0), max_new_tokens=4)
    before = [state.stored().dense()[0].clone() for state in session.cache.states]
    session.ask(text(1), max_new_tokens=4)
    for state, keys in zip(session.cache.states, before, strict=True):
        assert torch.equal(state.stored().dense()[0][:, :, : keys.shape[2]], keys)


def test_a_dropped_message_equals_a_drop_of_its_tokens(new):
    session = new("knorm", 500)
    session.ask(Message(text(0), "tool", "listing"), "What is there?", max_new_tokens=4)
    session.ask(text(1), max_new_tokens=4)
    item = next(each for each in session.record.items if each.id == "listing")
    edited = copy.deepcopy(session.context.cache)
    edited.drop((item.start, item.stop))
    ids = torch.cat([session.ids[:, : item.start], session.ids[:, item.stop :]], 1)
    later = {each.id: each for each in session.record.items}
    session.drop("listing", now=True)
    assert torch.equal(session.ids, ids)
    for state, other in zip(session.cache.states, edited.states, strict=True):
        assert torch.equal(state.positions(), other.positions())
        torch.testing.assert_close(state.stored().dense(), other.stored().dense())
    assert [each.id for each in session.record.items] == ["m0", "m1", "m2", "m3"]
    for each in session.record.items:
        assert each.start == later[each.id].start - item.tokens
        assert each.tokens == later[each.id].tokens


def test_items_are_the_texts_of_their_messages(new, tokenizer):
    session = new("knorm", 500)
    session.ask(Message(text(0), "tool", "a"), Message(text(1), id="b"), max_new_tokens=4)
    session.ask(Message(text(2), id="c"), max_new_tokens=4)
    session.shorten("a", text(3, 2))
    said = {
        each.id: tokenizer.decode(session.ids[0, each.start : each.stop])
        for each in session.record.items
    }
    assert [said[name] for name in "abc"] == [text(3, 2), text(1), text(2)]


def test_edits_wait_until_they_free_a_share(new):
    session = new("knorm", 500)
    for turn in range(8):
        session.ask(Message(text(turn, 3), id=f"t{turn}"), max_new_tokens=1)
    ids, dropped = session.ids, 0
    for turn in range(8):
        session.drop(f"t{turn}")
        dropped += 3
        if dropped <= QUEUED * ids.shape[1]:
            assert session.ids is ids and f"t{turn}" in session.record.queued
        else:
            break
    assert 1 <= turn < 7 and not session.record.queued
    assert session.ids.shape[1] == ids.shape[1] - dropped
    assert f"t{turn}" not in {each.id for each in session.record.items}


def test_many_edits_in_one_pass_equal_single_ones(new):
    session, other = new("knorm", 500), new("knorm", 500)
    for each in (session, other):
        for turn in range(8):
            each.ask(Message(text(turn, 10), id=f"t{turn}"), max_new_tokens=4)
    session.drop("t5")
    session.shorten("t2", text(9, 3))
    other.drop("t5", now=True)
    other.shorten("t2", text(9, 3))
    assert torch.equal(session.ids, other.ids) and session.record.items == other.record.items


def test_a_saved_session_goes_on_bit_for_bit(new, model, tokenizer, tmp_path):
    session = new()
    for turn in range(5):
        session.ask(text(turn, 12), max_new_tokens=4)
    session.drop(session.record.items[0].id)
    session.save(tmp_path / "session")
    loaded = kvfold.load_session(tmp_path / "session", model, tokenizer)
    assert (
        loaded.record.items == session.record.items
        and loaded.record.queued == session.record.queued
    )
    assert loaded.stats().later == session.stats().later > 0
    for turn in range(5, 10):
        assert loaded.ask(text(turn, 12), max_new_tokens=4) == session.ask(
            text(turn, 12), max_new_tokens=4
        )
    assert (
        torch.equal(loaded.ids, session.ids)
        and loaded.record.compactions == session.record.compactions
    )
    for state, other in zip(session.cache.states, loaded.cache.states, strict=True):
        assert torch.equal(state.stored().dense()[0], other.stored().dense()[0])


def of(name: str, **changes: Any) -> Any:
    """A change of a session's header: other fields of the message `name`."""
    return lambda session: (
        session
        | {"items": [each | changes if each["id"] == name else each for each in session["items"]]}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (of("a", stop=10**6), "do not follow each other within its"),
        (of("a", start=2**70, stop=2**70), "do not follow each other"),
        (of("m0", start=-5), "do not follow each other"),
        (of("a", stop=0), "do not follow each other"),
        (of("a", start=0), "do not follow each other"),
        (of("a", id="m0"), "two of its messages have the same id"),
        (lambda session: session | {"queued": ["zzz"]}, "drops a message 'zzz'"),
        (lambda session: session | {"numbered": -3}, "does not have this version's fields"),
        (lambda session: session | {"turns": -1}, "does not have this version's fields"),
        (lambda session: session | {"compactions": -1}, "does not have this version's fields"),
    ],
)
def test_a_file_of_a_session_that_cannot_be_is_refused(
    new, model, tokenizer, tmp_path, changed, said
):
    session = new("knorm", 500)
    session.ask(text(0), Message(text(1), "tool", "a"), max_new_tokens=4)
    session.ask(text(2), max_new_tokens=4)
    session.save(tmp_path / "session")
    header = read_header(tmp_path / "session").session
    assert header is not None
    path = rewritten(
        tmp_path / "odd", tmp_path / "session", session=changed(header.model_dump(mode="json"))
    )
    with pytest.raises(ContextFileError, match=said):
        kvfold.load_session(path, model, tokenizer)


def test_an_error_leaves_the_session_as_it_was(new, model, monkeypatch):
    session = new()
    for turn in range(4):
        session.ask(text(turn, 12), max_new_tokens=4)
    before, items = session.context, session.record.items
    kept = session.stats().kept
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.ask(text(5, 30), max_new_tokens=4)
    assert (
        session.context is before and session.record.items is items and session.stats().kept == kept
    )
    monkeypatch.undo()
    assert session.ask(text(5, 30), max_new_tokens=4).tokens


def test_what_was_evicted_is_dropped_already_and_cannot_be_shortened(new):
    session = new("local_window", 21)
    for turn in range(8):
        session.ask(Message(text(turn, 12), id=f"t{turn}"), max_new_tokens=4)
    with pytest.raises(KvfoldError, match="nothing is left of message 't0'"):
        session.shorten("t0", "less")
    ids = session.ids
    session.drop("t0", now=True)
    assert torch.equal(session.ids, ids) and session.record.items[0].id != "t0"


@pytest.mark.parametrize(
    ("method", "budget", "error", "said"),
    [
        ("kvzip", 60, KvfoldError, "forwards of its own"),
        ("snapkv", 0.5, BudgetError, "number of tokens"),
        ("full", None, BudgetError, "number of tokens"),
        ("snapkv + kivi:group=8", 60, KvfoldError, "encodes keys"),
        ("triattention", 60, KvfoldError, "evicts nothing"),
        ("knorm + every:interval=8,prompt=kept", 60, KvfoldError, "evicts nothing"),
        ("d2o_official", 60, KvfoldError, "stay whole"),
        ("streaming_llm:sinks=40", 90, KvfoldError, "longer text"),
    ],
)
def test_methods_that_cannot_hold_a_session_are_refused(new, method, budget, error, said):
    with pytest.raises(error, match=said):
        new(method, budget)


def test_bad_input_is_refused(new, model, tokenizer, tmp_path):
    session = new()
    session.ask(Message("one", id="a"), max_new_tokens=2)
    with pytest.raises(KvfoldError, match="at least one message"):
        session.ask()
    with pytest.raises(KvfoldError, match="message 'a' already"):
        session.ask(Message("two", id="a"))
    for name in (["a"], None):
        with pytest.raises(KvfoldError, match="no message"):
            session.drop(name)
        with pytest.raises(KvfoldError, match="no message"):
            session.shorten(name, "o")
    with pytest.raises(KvfoldError, match="no message 'b'"):
        session.drop("b")
    for longer in ("", "two words"):
        with pytest.raises(KvfoldError, match="message 'a' has 1 tokens, and its new text"):
            session.shorten("a", longer)
    with pytest.raises(KvfoldError, match="set num_beams"):
        session.ask("two", num_beams=2)
    summing = new("h2o")
    summing.ask(Message("one", id="a"), max_new_tokens=2)
    with pytest.raises(KvfoldError, match="sums the attention"):
        summing.shorten("a", "two")
    kvfold.compress(model, tokenizer, QUESTION, "knorm", 20).save(tmp_path / "context")
    with pytest.raises(ContextFileError, match="no session"):
        kvfold.load_session(tmp_path / "context", model, tokenizer)


def test_ids_of_the_session_keep_clear_of_given_ones(new):
    session = new("knorm", 500)
    session.ask(Message(text(0), id="m1"), Message(text(1)), max_new_tokens=2)
    session.ask(text(2), Message(text(3), id="m5"), max_new_tokens=2)
    names = [each.id for each in session.record.items]
    assert len(set(names)) == len(names) == 6
    session.drop("m1", now=True)
    assert "m1" not in {each.id for each in session.record.items}


def test_an_edit_that_fails_changes_nothing(new, model, monkeypatch):
    session = new("knorm", 500)
    for turn in range(3):
        session.ask(Message(text(turn), id=f"t{turn}"), max_new_tokens=2)
    context, record = session.context, session.record
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.edit(["t0"], {"t2": text(9, 2)})
    with pytest.raises(KvfoldError, match="no message"):
        session.edit(["t0", "none"], {})
    assert session.context is context and session.record is record


def test_a_message_is_not_dropped_and_shortened_in_one_edit(new):
    session = new("knorm", 500)
    session.ask(Message(text(0), id="a"), Message(text(1), id="b"), max_new_tokens=2)
    context, record = session.context, session.record
    with pytest.raises(KvfoldError, match="message 'b' is dropped or shortened, not both"):
        session.edit(["a", "b"], {"b": text(2, 2)}, now=True)
    assert session.context is context and session.record is record


@pytest.mark.slow
def test_a_message_whose_drop_waits_is_not_shortened(new):
    session = new("knorm", 500)
    session.ask(Message(text(0), id="a"), Message(text(1, 3), id="b"), max_new_tokens=2)
    session.drop("b")
    context, record = session.context, session.record
    assert record.queued == ("b",)
    with pytest.raises(KvfoldError, match="message 'b' is dropped or shortened, not both"):
        session.shorten("b", text(2, 2))
    assert session.context is context and session.record is record


def test_a_message_is_dropped_rather_than_shortened(new):
    session = new("knorm", 500)
    session.ask(Message(text(0, 3), id="a"), Message(text(1), id="b"), max_new_tokens=2)
    session.drop("a")
    before = session.ids.shape[1]
    session.shorten("b", text(2, 4))
    assert session.record.queued == () and session.ids.shape[1] == before - 3 - 6
    assert session.record.items[0].id == "b"


def test_a_stop_string_and_a_longer_session(new, model, tokenizer):
    session = new("knorm", 500)
    reply = session.ask(text(0), max_new_tokens=12)
    again = new("knorm", 500).ask(text(0), max_new_tokens=12, stop=reply.text.split()[1])
    assert again.text.split() == reply.text.split()[:1] and again.ended == "stop"
    with pytest.raises(KvfoldError, match="allow_longer=True"):
        session.ask(" ".join(["grass"] * 5000))
    longer = " ".join(["grass"] * 5000)
    begun = kvfold.begin_session(model, tokenizer, longer, "knorm", 5100, allow_longer=True)
    assert begun.ask(text(0), max_new_tokens=2).tokens


def test_a_turn_without_tokens_is_refused(new):
    with pytest.raises(KvfoldError, match="no tokens"):
        new().ask("")


def test_a_message_that_no_file_could_hold_is_refused(tmp_path: Path) -> None:
    """Else the session could never be saved again."""
    session = kvfold.begin_session(*kvfold.bundled_model(), "Be brief. " * 9, budget=200)
    for wrong, said in (
        (Message("Hi", "system"), "a message's role"),  # type: ignore[arg-type]
        (Message("Hi", "assistant"), "a message's role"),  # type: ignore[arg-type]
        (Message("Hi", id=7), "a message's id is a text"),  # type: ignore[arg-type]
        (Message("Hi", id="\ud800"), "half a character"),
        (Message(b"Hi"), "a text is wanted"),  # type: ignore[arg-type]
    ):
        with pytest.raises(KvfoldError, match=said):
            session.ask(wrong, max_new_tokens=1)
    for turn in ("Hi", [None], [], 3):
        with pytest.raises(KvfoldError, match=r"a turn (is a list of|has at least one)"):
            session.open(turn)  # type: ignore[arg-type]
    session.ask("Hi", max_new_tokens=1)
    session.save(tmp_path / "a.kvfold")
    with pytest.raises(KvfoldError, match="begins with a Context"):
        kvfold.Session(session)  # type: ignore[arg-type]
