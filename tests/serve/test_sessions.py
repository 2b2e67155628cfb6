# SPDX-License-Identifier: Apache-2.0
"""Sessions on the server: forty turns in few entries, edits, memory, and what a kill leaves."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

import kvfold
from kvfold.cache.state import LayerState
from kvfold.contexts.session import Message
from kvfold.serve.sessions import SessionPool
from kvfold.serve.stored import size_of
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.serving import NAME, Running, assert_clean, braked, running, until
from tests.helpers.tokenizers import word_tokenizer

WORDS = DOCUMENT.split()
OPENING = " ".join(WORDS[:20])
BUDGET, ANSWER = 80, 6


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Any:
    with running(model, word_tokenizer(), answer_tokens=100) as made:
        yield made


def text(turn: int, words: int = 24) -> str:
    return " ".join(WORDS[(turn * 7 + i) % len(WORDS)] for i in range(words))


def begin(server: Running, **options: Any) -> str:
    body = {"text": OPENING, "method": "knorm", "budget": BUDGET} | options
    made = server.http.post("/v1/sessions", json=body)
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def tool(turn: int) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": f"call{turn}", "content": text(turn)}


def turn(server: Running, session: str, *messages: dict[str, Any], **options: Any) -> Any:
    given = [*messages, {"role": "user", "content": QUESTION}]
    body = {"model": NAME, "temperature": 0, "max_tokens": ANSWER, "session_id": session}
    return server.http.post("/v1/chat/completions", json=body | {"messages": given} | options)


def said(answered: httpx.Response) -> str:
    assert answered.status_code == 200, answered.text
    return str(answered.json()["choices"][0]["message"]["content"])


def about(server: Running, session: str) -> dict[str, Any]:
    answered = server.http.get(f"/v1/sessions/{session}")
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


class Seen:
    """Tokens of all forwards of a model, and the most entries that a head held in any of them."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.peak = 0, 0
        append, read = LayerState.append, type(model).forward

        def watched(state: LayerState, *new: Any) -> Any:
            stored = append(state, *new)
            self.peak = max(self.peak, stored[0].shape[2])
            return stored

        def counted(own: Any, input_ids: Any, **options: Any) -> Any:
            self.read += input_ids.shape[1]
            return read(own, input_ids=input_ids, **options)

        monkeypatch.setattr(LayerState, "append", watched)
        monkeypatch.setattr(type(model), "forward", counted)


@pytest.mark.whole
@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["knorm", None], ids=["knorm", "the server's default"])
def test_forty_turns_read_each_token_once_in_few_entries(model, method, monkeypatch):
    """Within each turn too, before it compacts; listings are shortened, and dropped later."""
    named = {} if method is None else {"method": method}
    with running(model, word_tokenizer()) as server:
        default = server.engine.settings.session_method
        body = {"text": OPENING, "budget": 240} | named
        session = server.http.post("/v1/sessions", json=body).json()["id"]
        opening, seen = about(server, session)["tokens"], Seen(model, monkeypatch)
        shortened = 0
        for index in range(40):
            answer = said(turn(server, session, tool(index)))
            edits: dict[str, Any] = {}
            if index >= 3 and index % 2:
                edits["shorten"] = {f"call{index - 3}": text(index, 2)}
                shortened += 1
            if index >= 10:  # what is said when is dropped ten turns later
                edits["drop"] = [f"call{index - 10}"]
            if edits:
                edited = server.http.post(f"/v1/sessions/{session}/edits", json=edits)
                assert edited.status_code == 200, edited.text
        known = about(server, session)
    monkeypatch.undo()
    alone = kvfold.begin_session(model, word_tokenizer(), OPENING, method or default, 240)
    for index in range(40):
        messages = [Message(text(index), "tool", f"call{index}"), Message(QUESTION)]
        reply = alone.ask(*messages, max_new_tokens=ANSWER)
        shorter = {f"call{index - 3}": text(index, 2)} if index >= 3 and index % 2 else {}
        alone.edit([f"call{index - 10}"] if index >= 10 else [], shorter)
    assert answer == reply.text.strip()
    assert known["tokens"] == alone.ids.shape[1]
    new = seen.read - 2 * shortened  # of the turns
    assert shortened > 15 and seen.read <= 1.05 * new
    assert known["tokens"] < opening + new - 24 * 20
    assert seen.peak <= 0.4 * (opening + new)
    assert known["turns"] == 40 and known["compactions"] > 0


def test_new_messages_only_and_by_header(server, model):
    session = begin(server)
    alone = kvfold.begin_session(model, word_tokenizer(), OPENING, "knorm", BUDGET)
    for index in range(6):
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": text(index)}],
            "max_tokens": ANSWER,
            "temperature": 0,
        }
        answered = server.http.post(
            "/v1/chat/completions", json=body, headers={"X-Kvfold-Session": session}
        )
        assert said(answered) == alone.ask(text(index), max_new_tokens=ANSWER).text.strip()
        usage = answered.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    streamed = server.openai.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": text(9)}],
        stream=True,
        max_tokens=ANSWER,
        temperature=0,
        extra_body={"session_id": session},
    )
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert pieces == alone.ask(text(9), max_new_tokens=ANSWER).text.strip()


def test_edits_by_id(server):
    session = begin(server, budget=1000)
    for index in range(5):
        turn(server, session, tool(index))
    before = about(server, session)
    url = f"/v1/sessions/{session}/edits"
    waiting = server.http.post(url, json={"drop": ["m0"]}).json()
    assert waiting["tokens"] == before["tokens"]
    assert [one["id"] for one in waiting["messages"] if one["queued"]] == ["m0"]
    done = server.http.post(url, json={"shorten": {"call2": text(0, 5)}}).json()
    assert done["tokens"] == before["tokens"] - 3 - 19
    names = {one["id"]: one["tokens"] for one in done["messages"]}
    assert "m0" not in names and names["call2"] == 5
    assert_clean(server.http.post(url, json={"drop": ["call9"]}), 400, "no message 'call9'")
    assert_clean(server.http.post(url, json={}), 400, "name messages")
    both = {"drop": ["call3"], "shorten": {"call3": "less"}}
    assert_clean(server.http.post(url, json=both), 400, "not both")
    longer = {"shorten": {"call3": text(0, 25)}}
    assert_clean(server.http.post(url, json=longer), 400, "has 24 tokens")
    assert said(turn(server, session))


def test_the_list_and_deletion(server):
    first, second = begin(server), begin(server, id="named")
    assert second == "named"
    listed = server.http.get("/v1/sessions?limit=1000").json()
    assert {first, second} <= {one["id"] for one in listed["data"]} and not listed["has_more"]
    assert server.http.delete("/v1/sessions/named").json()["deleted"]
    assert_clean(server.http.get("/v1/sessions/named"), 404, "no session 'named'")
    assert_clean(turn(server, "named"), 404, "no session 'named'")
    assert server.metric('kvfold_sessions{place="memory"}') >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"method": "kvzip"}, "forwards of its own"),
        ({"method": "nothing"}, "nothing"),
        ({"budget": 5}, "at least"),
        ({"budget": 0.5}, "budget"),
        ({"text": ""}, "text"),
        ({"method": "d2o_official"}, "stay whole"),
    ],
)
def test_sessions_refused(server, body, named):
    answered = server.http.post("/v1/sessions", json={"text": OPENING, "budget": BUDGET} | body)
    assert_clean(answered, 400, named)


def test_turns_refused_leave_the_session(server):
    session = begin(server)
    said(turn(server, session, tool(0)))
    before = about(server, session)
    answer = {"role": "assistant", "content": "I said so"}
    assert_clean(turn(server, session, answer), 400, "send only new messages")
    assert_clean(turn(server, session, tool(0)), 400, "message 'call0' already")
    context = server.create(DOCUMENT)
    assert_clean(turn(server, session, context_id=context), 400, "not both")
    clash = server.http.post(
        "/v1/chat/completions",
        json={"model": NAME, "messages": [tool(1)], "session_id": session},
        headers={"X-Kvfold-Session": "other"},
    )
    assert_clean(clash, 400, "two pasts")
    completion = {"model": NAME, "prompt": "a", "max_tokens": 1}
    header = {"X-Kvfold-Session": session}
    refused = server.http.post("/v1/completions", json=completion, headers=header)
    assert_clean(refused, 400, "chat/completions")
    alone = {"model": NAME, "messages": [tool(1)]}
    assert_clean(server.http.post("/v1/chat/completions", json=alone), 400, "for sessions")
    assert about(server, session) == before


def test_one_request_at_a_time(model):
    with running(model, word_tokenizer(), workers=2) as server, ThreadPoolExecutor(1) as pool:
        session = begin(server)
        with braked(model):
            first = pool.submit(turn, server, session)
            until(lambda: about(server, session)["in_use"])
            assert_clean(turn(server, session), 409, "in use")
        assert said(first.result())
        assert about(server, session)["turns"] == 1 and not about(server, session)["in_use"]


def test_a_client_that_hangs_up_takes_its_turn_back(model):
    with running(model, word_tokenizer()) as server:
        session = begin(server)
        said(turn(server, session, tool(0)))
        before = about(server, session)
        with braked(model), pytest.raises(httpx.ReadTimeout):
            impatient = httpx.Client(base_url=server.url, timeout=0.3)
            body = {"model": NAME, "messages": [tool(1)], "session_id": session}
            impatient.post("/v1/chat/completions", json=body)
        until(lambda: not about(server, session)["in_use"])
        assert about(server, session) == before
        assert said(turn(server, session, tool(1)))


def test_a_client_that_hangs_up_does_not_wait_for_memory(model):
    one = size_of(kvfold.begin_session(model, word_tokenizer(), OPENING, "knorm", BUDGET))
    with (
        running(model, word_tokenizer(), session_memory=4 * one, workers=2) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        busy, other = begin(server), begin(server)
        before, workers = about(server, other), server.engine.workers
        with braked(model):
            first = pool.submit(turn, server, busy)
            until(lambda: about(server, busy)["in_use"])
            impatient = httpx.Client(base_url=server.url, timeout=0.3)
            body = {"model": NAME, "messages": [tool(1)], "session_id": other}
            body |= {"max_tokens": ANSWER}
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/chat/completions", json=body)
            assert workers.running == 2
            until(lambda: workers.running == 1)
            assert about(server, busy)["in_use"]
        assert said(first.result())
        assert about(server, other) | {"place": "memory"} == before
        assert said(turn(server, other, tool(1)))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("turns", "at_once"), [(2, 8), pytest.param(10, 50, marks=pytest.mark.slow)]
)
def test_fifty_sessions_under_a_memory_cap_answer_as_alone(model, turns, at_once):
    one = size_of(kvfold.begin_session(model, word_tokenizer(), text(0, 60), "knorm", BUDGET))
    with running(model, word_tokenizer(), session_memory=12 * one, workers=2, queue=100) as server:
        sessions = [begin(server, text=text(index, 20 + index % 3)) for index in range(50)]
        pool: SessionPool = server.engine.sessions.held
        with ThreadPoolExecutor(at_once) as clients:
            for index in range(turns):
                answered = clients.map(
                    lambda at: said(turn(server, at[1], tool(at[0]))),
                    [(index, session) for session in sessions],
                )
                last = list(answered)
                assert pool.nbytes <= pool.memory
        assert pool.to_disk > 50 and pool.to_memory > 50
        with pool._changed:
            there = [held.value for held in pool._held.values() if held.value is not None]
        assert pool.nbytes == sum(map(size_of, there))
    for index in (0, 17, 49):
        alone = kvfold.begin_session(
            model, word_tokenizer(), text(index, 20 + index % 3), "knorm", BUDGET
        )
        for at in range(turns):
            messages = [Message(text(at), "tool", f"call{at}"), Message(QUESTION)]
            reply = alone.ask(*messages, max_new_tokens=ANSWER)
        assert last[index] == reply.text.strip()
        assert turns == 2 or alone.record.compactions > 0


@pytest.mark.slow
def test_memory_is_counted_right_whatever_is_changed_and_moved(model):
    one = size_of(kvfold.begin_session(model, word_tokenizer(), OPENING, "knorm", BUDGET))
    with running(model, word_tokenizer(), session_memory=8 * one, workers=4, queue=100) as server:
        names = [f"s{index}" for index in range(8)]
        for name in names:
            begin(server, id=name)

        def worked(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(12):
                name, kind = draw.choice(names), draw.randrange(4)
                if kind == 0:
                    edits = {"drop": [f"m{draw.randrange(9)}"], "now": draw.random() < 0.5}
                    server.http.post(f"/v1/sessions/{name}/edits", json=edits)
                elif kind == 1 and draw.random() < 0.5:
                    server.http.delete(f"/v1/sessions/{name}")
                    body = {"text": OPENING, "method": "knorm", "budget": BUDGET, "id": name}
                    server.http.post("/v1/sessions", json=body)
                else:
                    messages = [{"role": "user", "content": text(draw.randrange(40))}]
                    turn(server, name, *messages)

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(worked, range(8)))
        pool: SessionPool = server.engine.sessions.held
        with pool._changed:
            there = [held.value for held in pool._held.values() if held.value is not None]
            assert all(held.idle for held in pool._held.values())
        assert pool.nbytes == sum(map(size_of, there)) <= pool.memory


def test_a_session_read_from_disk_needs_no_more_memory_than_was_claimed(model):
    """Entries come back with more room for new ones than they had when they left."""
    first = kvfold.begin_session(model, word_tokenizer(), OPENING, "knorm", 500)
    size = size_of(first)
    with running(model, word_tokenizer(), session_memory=size * 2 + 40_000) as server:
        pool = server.engine.sessions.held
        sessions = [begin(server, budget=500) for _ in range(4)]
        for index in range(12):
            answered = turn(server, sessions[index % 4], tool(index), max_tokens=1)
            assert answered.status_code in (200, 413), answered.text
        assert pool.nbytes <= pool.memory


def test_a_save_that_fails_keeps_the_session_usable(model, tmp_path, monkeypatch):
    with running(model, word_tokenizer(), folder=tmp_path / "kept") as server:
        session = begin(server)
        with monkeypatch.context() as patch:
            patch.setattr(kvfold.Session, "save", lambda *_: 1 / 0)
            assert turn(server, session, tool(0)).status_code == 500
        assert not about(server, session)["in_use"]
        assert said(turn(server, session, tool(1)))


@pytest.mark.slow
def test_a_turn_that_memory_lacks_to_save_is_answered_and_counted_once(
    model, tmp_path, monkeypatch
):
    def short_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for a copy")

    with running(model, word_tokenizer(), folder=tmp_path / "kept") as server:
        session = begin(server)
        with monkeypatch.context() as patch:
            patch.setattr(kvfold.Session, "save", short_of_memory)
            assert said(turn(server, session, tool(0)))
        assert about(server, session)["turns"] == 1


def test_a_session_that_is_asked_is_not_moved_to_make_room_for_itself(model):
    text = " ".join(DOCUMENT.split()[:60])
    begun = kvfold.begin_session(model, word_tokenizer(), text, "knorm", BUDGET)
    with running(model, word_tokenizer(), session_memory=int(5.5 * size_of(begun))) as server:
        oldest, *_ = [begin(server, text=text, budget=BUDGET) for _ in range(5)]
        held = server.engine.sessions.held
        assert held.to_disk == 0
        assert said(turn(server, oldest, max_tokens=2))
        assert (held.to_disk, held.to_memory) == (1, 0)


def test_limits_of_a_text_hold_for_messages(model):
    with running(model, word_tokenizer(), context_tokens=60, answer_tokens=5) as server:
        session = begin(server)
        long = {"role": "tool", "content": text(0, 80)}
        assert_clean(turn(server, session, long), 400, "takes 60")
        answered = turn(server, session, max_tokens=10**9).json()
        assert answered["usage"]["completion_tokens"] == 5
        assert answered["choices"][0]["finish_reason"] == "length"
        assert said(turn(server, session))


def test_a_session_larger_than_the_memory_is_refused(model):
    one = size_of(kvfold.begin_session(model, word_tokenizer(), OPENING, "knorm", BUDGET))
    with running(model, word_tokenizer(), session_memory=int(1.5 * one)) as server:
        session = begin(server)
        assert_clean(turn(server, session), 413, "takes")
        assert about(server, session)["turns"] == 0


def test_what_a_kill_leaves_goes_on_after_the_last_turn(model, tmp_path):
    kept, copied = tmp_path / "kept", tmp_path / "copied"
    with running(model, word_tokenizer(), folder=kept) as server:
        session = begin(server)
        assert (kept / "sessions" / f"{session}.kvfold").exists()
        for index in range(6):
            said(turn(server, session, tool(index)))
        server.http.post(f"/v1/sessions/{session}/edits", json={"drop": ["call5"], "now": True})
        known = about(server, session)
        with ThreadPoolExecutor(1) as client:
            with braked(model):
                broken = client.submit(turn, server, session, tool(6))
                until(lambda: about(server, session)["in_use"])
                shutil.copytree(kept, copied)  # what a kill in the middle of a turn leaves
            rest = [said(broken.result()), said(turn(server, session, tool(7)))]
    with running(model, word_tokenizer(), folder=copied) as server:
        assert not list(server.engine.sessions.held.adopt())
        again = about(server, session)
        for name in ("turns", "tokens", "messages", "compactions", "entries"):
            assert again[name] == known[name]
        assert [said(turn(server, session, tool(at))) for at in (6, 7)] == rest


def test_a_folder_without_room_for_sessions_keeps_them_until_the_end(model, tmp_path):
    folder = tmp_path / "contexts"
    folder.mkdir()
    (folder / "sessions").write_text("in the way")
    with running(model, word_tokenizer(), folder=folder) as server:
        assert said(turn(server, begin(server)))
    assert (folder / "sessions").read_text() == "in the way"
