# SPDX-License-Identifier: Apache-2.0
"""The queue: full, left by clients that hang up, and its end."""

from __future__ import annotations

import datetime
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from transformers.utils import chat_template_utils

import kvfold
from kvfold.errors import KvfoldError
from kvfold.methods.stages.refit import least_squares, matching
from kvfold.serve.context_pool import TEXT
from tests.helpers.chats import chat_tokenizer
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build
from tests.helpers.packages import Package
from tests.helpers.serving import CHAT, NAME, assert_clean, braked, chat, head, running, send, until
from tests.helpers.tokenizers import SPECIAL, WORDS, word_tokenizer

pytestmark = pytest.mark.usefixtures("goes_on")


def test_a_full_queue_says_when_to_come_again(server, model, context):
    with braked(model) as brake, ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.chat, QUESTION, context_id=context)
        until(lambda: server.engine.workers.running == 1)
        second = pool.submit(server.chat, QUESTION, context_id=context)
        until(lambda: server.engine.workers.waiting == 1)
        assert server.metric("kvfold_queue_depth") == 1 and server.metric("kvfold_running") == 1
        for path, body in ((CHAT, chat()), ("/v1/contexts", {"text": DOCUMENT})):
            full = server.http.post(path, json=body)
            assert_clean(full, 429, "1 requests are waiting")
            assert int(full.headers["retry-after"]) >= 1
        with pytest.raises(Package("openai").RateLimitError):
            server.openai.completions.create(model=NAME, prompt=QUESTION)
        assert server.http.get("/v1/contexts").status_code == 200
        brake.go.set()
        assert first.result().text and first.result().status_code == 200
        assert second.result().status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path, body", [(CHAT, chat()), ("/v1/contexts", {"text": DOCUMENT})])
def test_nobody_has_an_answer_before_the_place_is_free(model, path, body):
    with (
        running(model, word_tokenizer(), queue=0) as server,
        braked(model) as brake,
        ThreadPoolExecutor(1) as pool,
    ):
        workers = server.engine.workers
        asking = pool.submit(server.http.post, path, json=body)
        until(lambda: brake.forwards == 1)
        with workers._lock:
            brake.go.set()
            with pytest.raises(TimeoutError):
                asking.result(timeout=1)
        assert asking.result().is_success
        assert workers.admitted == 0


def test_who_hangs_up_in_mid_stream_is_not_generated_for(server, model, context):
    body = chat(context_id=context, stream=True, max_tokens=3000)
    with braked(model) as brake:
        brake.go.set()
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=60) as answered:
            for line in answered.iter_lines():
                if '"content": "' in line and brake.forwards > 3:
                    break
        until(lambda: server.engine.workers.admitted == 0)
        assert brake.forwards < 1500
        assert server.engine.contexts.get(context).readers == 0
    assert server.metric("kvfold_abandoned_tokens_total") > 0


def test_who_hangs_up_before_the_answer_frees_the_place(server, model, context):
    with braked(model) as brake:
        for stream in (False, True):
            with socket.create_connection(("127.0.0.1", server.port)) as running_one:
                send(running_one, chat(context_id=context, max_tokens=3000, stream=stream))
                until(lambda: brake.forwards == 1)
                with socket.create_connection(("127.0.0.1", server.port)) as queued:
                    send(queued, chat(context_id=context, max_tokens=3000, stream=stream))
                    until(lambda: server.engine.workers.waiting == 1)
                # The place in the queue is free before anything was computed for it.
                until(lambda: server.engine.workers.waiting == 0)
                assert brake.forwards == 1
            brake.go.set()
            until(lambda: server.engine.workers.admitted == 0)
            assert brake.forwards < 1500
            brake.forwards = 0
            brake.go.clear()


def test_a_context_that_nobody_waits_for_is_not_made(model):
    with (
        running(model, word_tokenizer(), prefill_chunk=10) as server,
        braked(model) as brake,
    ):
        workers = server.engine.workers
        with socket.create_connection(("127.0.0.1", server.port)) as made:
            request = httpx.Request("POST", "http://a", json={"text": DOCUMENT, "id": "lost"})
            length = f"Content-Length: {len(request.content)}"
            made.sendall(head("/v1/contexts", length) + request.content)
            until(lambda: brake.forwards == 1)
        until(lambda: any(cancelled.is_set() for cancelled in workers._cancels))
        brake.go.set()
        until(lambda: workers.admitted == 0)
        assert brake.forwards == 1
        assert server.http.get("/v1/contexts").json()["data"] == []
        assert server.engine.contexts.nbytes == 0


@pytest.mark.slow
def test_a_context_deleted_while_it_is_read_goes_on_for_its_reader(server, model):
    before = server.engine.contexts.nbytes
    name = server.create(DOCUMENT, id="short-lived")
    alone = server.says(QUESTION, context_id=name)
    with braked(model) as brake, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.says, QUESTION, context_id=name)
        until(lambda: brake.forwards == 1)
        assert server.http.get(f"/v1/contexts/{name}").json()["readers"] == 1
        assert server.http.delete(f"/v1/contexts/{name}").status_code == 200
        assert server.http.get(f"/v1/contexts/{name}").status_code == 404
        assert server.http.get("/v1/contexts").json()["data"][-1]["id"] != name
        assert server.engine.contexts.nbytes > before
        brake.go.set()
        assert reading.result() == alone
    until(lambda: server.engine.contexts.nbytes == before)
    assert server.chat(QUESTION, context_id=name).status_code == 404


def test_a_context_replaced_after_it_was_found_answers_nothing(model):
    words = DOCUMENT.split()
    text, other = " ".join(words[:60]), " ".join(reversed(words[:60]))
    with running(model, word_tokenizer()) as server:
        server.create(text, id="a")
        engine = server.engine
        find = engine._longest_prefix

        def replaced_meanwhile(*prompt: Any) -> Any:
            found = find(*prompt)
            engine.contexts.delete("a")
            engine.contexts.add(kvfold.compress(model, word_tokenizer(), other, "snapkv", 40), "a")
            return found

        asked = f"{text}\n\n{QUESTION}"
        alone = server.says(asked, prefix_cache=False)
        engine._longest_prefix = replaced_meanwhile
        answer = server.chat(asked).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["message"]["content"] == alone


def test_a_context_that_no_chat_budget_fits_is_read_as_text_unless_it_is_named(model):
    asked = f"{DOCUMENT}\n\n{QUESTION}"
    with running(model, word_tokenizer(), chat_budget=40) as server:
        alone = server.says(asked)
        server.create(DOCUMENT, id="a", method="snapkv:window=64", budget=100)
        assert server.says(asked) == alone
        assert server.chat(QUESTION, context_id="a").status_code == 400


def test_a_context_is_found_on_the_day_that_its_template_tells(model, monkeypatch):
    """By its text alone, as where a document's last token merges with the blank line after it."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime(2026, 11, day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer, day = chat_tokenizer(), 1
    tokenizer.chat_template = "{{ strftime_now('we %d ') }}" + tokenizer.chat_template
    with running(model, tokenizer) as server:
        find, cached = server.engine.contexts.longest, []
        monkeypatch.setattr(
            server.engine.contexts,
            "longest",
            lambda kind, data: find(kind, data) if kind == TEXT else None,
        )
        for day in (1, 2):
            server.create(DOCUMENT, id=f"on-{day}")
            usage = server.chat(f"{DOCUMENT}\n\n{QUESTION}").json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] > 0


def test_turns_within_a_chat_budget_are_read_in_chunks(model):
    earlier = {"role": "user", "content": " ".join(DOCUMENT.split()[:60])}
    turns = [earlier, {"role": "assistant", "content": "sky"}, {"role": "user", "content": "go"}]
    with running(model, word_tokenizer(), chat_budget=40) as server:
        whole = server.says("", messages=turns, context_id=server.create(DOCUMENT))
    sizes: list[int] = []
    with running(model, word_tokenizer(), chat_budget=40, prefill_chunk=16) as server:
        name = server.create(DOCUMENT)
        hook = model.register_forward_pre_hook(
            lambda *call: sizes.append(call[-1]["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            assert server.says("", messages=turns, context_id=name) == whole
        finally:
            hook.remove()
    assert max(sizes) == 16 and len(sizes) > 5


def test_a_stop_lets_what_was_accepted_end(model):
    with running(model, word_tokenizer()) as server:
        alone = server.says(QUESTION)
        folder = server.engine.contexts.folder.path
        server.http.get("/health")
        with braked(model) as brake, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.says, QUESTION) for _ in range(2)]
            until(lambda: server.engine.workers.admitted == 2)
            server.server.stop()
            for refused in (server.http.get("/ready"), server.http.post(CHAT, json=chat())):
                assert_clean(refused, 503, "stopping")
                assert refused.headers["retry-after"]
            assert server.http.get("/health").status_code == 200 and folder.exists()
            brake.go.set()
            assert [answer.result() for answer in answers] == [alone] * 2
        until(lambda: not folder.exists())


def test_the_grace_ends(model):
    with (
        running(model, word_tokenizer(), grace=0.1, answer_tokens=3000) as server,
        braked(model) as brake,
        ThreadPoolExecutor(1) as pool,
    ):
        brake.go.set()
        running_one = pool.submit(server.http.post, CHAT, json=chat(max_tokens=3000))
        until(lambda: brake.forwards > 3)
        server.server.stop()
        assert_clean(running_one.result(), 503, "stopping")
        assert brake.forwards < 2900


@pytest.mark.parametrize("ended_by", ["grace", "hang-up"])
def test_a_context_is_not_fitted_on_for_nobody(model, monkeypatch, ended_by):
    """Layers and heads are fitted one after another, without a forward in between."""
    begun, go, fits = Event(), Event(), []

    def slow(*given: Any) -> Any:
        fits.append(given)
        begun.set()
        go.wait(60)
        return least_squares.ridge_towards(*given)

    monkeypatch.setattr(matching, "ridge_towards", slow)
    with running(model, word_tokenizer(), method="snapkv:window=8 + match", grace=0.1) as server:
        workers = server.engine.workers
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            send(client, {"text": DOCUMENT}, "/v1/contexts")
            assert begun.wait(60)
            if ended_by == "grace":
                server.server.stop()
            else:
                client.close()
            until(lambda: all(each.is_set() for each in workers._cancels))
            go.set()
            until(lambda: workers.admitted == 0)
    assert len(fits) == 1


@pytest.mark.parametrize("codec", ["gzip", "kvtc:file=missing.safetensors"])
def test_a_codec_that_cannot_be_is_refused_at_the_start(model, codec):
    with (
        pytest.raises(KvfoldError, match=r"no codec 'gzip'|cannot read missing.safetensors"),
        running(model, word_tokenizer(), codec=codec),
    ):
        pass


@notices_drops
def test_an_answer_that_would_change_the_frequencies_is_refused():
    """A stream has begun by then: it ends in an error event."""
    with running(of_few_words(longrope()), word_tokenizer(), method="full", budget=None) as server:
        refused = server.chat("the " * 28)
        assert_clean(refused, 400, "changes its rotary frequencies at 32 tokens")
        assert refused.json()["error"]["type"] == "invalid_request_error"
        streamed = server.chat("the " * 28, stream=True)
        *_, event, end = streamed.text.split("\n\n")
        told = json.loads(event.removeprefix("data: "))
        assert streamed.status_code == 200 and told == refused.json() and end == ""
        for words in (4, 40):
            assert server.chat("the " * words).status_code == 200


@pytest.mark.slow
def test_a_table_of_positions_ends_texts_even_where_longer_ones_are_allowed():
    model = of_few_words(build("gpt2", n_positions=64))
    options = {"method": "full", "budget": None, "allow_longer": True}
    with running(model, word_tokenizer(), **options) as server:
        for body in (chat(max_tokens=8), chat(max_tokens=None)):
            body["messages"] = [{"role": "user", "content": "the " * 60}]
            answered = server.http.post(CHAT, json=body).json()
            assert answered["usage"]["total_tokens"] == 64
            assert answered["choices"][0]["finish_reason"] == "length"
        assert_clean(server.chat("the " * 100), 400, "the text has 101 tokens")
        assert_clean(server.http.post("/v1/contexts", json={"text": "the " * 100}), 400, "101")


@pytest.mark.parametrize("chat_budget", [None, 40])
def test_an_empty_question_is_refused_and_an_empty_turn_is_none(model, chat_budget):
    """Without a chat template, the tokenizer of words has no tokens for them."""
    empty = {"role": "user", "content": ""}
    said = [empty, {"role": "assistant", "content": ""}, {"role": "user", "content": QUESTION}]
    with running(model, word_tokenizer(), chat_budget=chat_budget) as server:
        name = server.create(DOCUMENT)
        for messages in ([empty], [*said, {"role": "assistant", "content": "the"}, empty]):
            for stream in (False, True):
                refused = server.chat("", context_id=name, messages=messages, stream=stream)
                assert_clean(refused, 400, "the last message is empty: ask something")
        alone = server.says(QUESTION, context_id=name)
        assert server.says("", context_id=name, messages=said) == alone
        # The document alone is no question about it.
        whole = server.says(f"{DOCUMENT}\n\n")
        assert whole == server.says(f"{DOCUMENT}\n\n", prefix_cache=False)


def of_few_words(model: Any) -> Any:
    """The model, with words of the tokenizer only in its answers."""
    words = len(SPECIAL + WORDS)
    model.generation_config.suppress_tokens = list(range(words, model.config.vocab_size))
    return model
