# SPDX-License-Identifier: Apache-2.0
"""`--shadow`: sampled answers are compared when the server is idle, and watched."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

import pytest

from kvfold.cache.fork import fork
from kvfold.serve.shadow import ShadowReader, mean_kl
from kvfold.serve.shadows import answering
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.registry import registry_restored
from tests.helpers.serving import CHAT, NAME, braked, running, until
from tests.helpers.tokenizers import word_tokenizer


@contextmanager
def registered(module: str) -> Iterator[None]:
    with registry_restored(module):
        import_module(module)
        yield


def compared(server) -> float:
    return server.metric("kvfold_shadowed_total")


def settled(server) -> None:
    """All that was sampled is compared or skipped."""
    shadows, answers = (
        server.engine.shadows,
        f'kvfold_requests_total{{route="{CHAT}",status="200"}}',
    )
    until(lambda: shadows.test.samples + sum(shadows.skipped.values()) == server.metric(answers))


def test_the_loss_is_that_of_the_answer_that_was_given(model):
    with running(model, word_tokenizer(), shadow=1.0, shadow_tolerance=0.9) as server:
        name = server.create(DOCUMENT)
        body = {"model": NAME, "prompt": "we go", "context_id": name, "temperature": 0}
        said = server.http.post("/v1/completions", json=body | {"max_tokens": 6}).json()
        until(lambda: compared(server) == 1)
        context = server.engine.contexts.get(name).value
        tokens = word_tokenizer()
        question = tokens("we go", add_special_tokens=False).input_ids
        answer = tokens(said["choices"][0]["text"], add_special_tokens=False).input_ids
        assert len(answer) == 6
        prompt = [*context.ids[0].tolist(), *question]
        expected = min(1.0, mean_kl(model, fork(context.cache), prompt, answer))
        assert math.isclose(server.metric("kvfold_shadow_loss"), expected, rel_tol=1e-4)
        assert server.metric("kvfold_certificate_holds") == 1


def test_full_contexts_lose_nothing_and_never_raise_an_alarm(model):
    with running(model, word_tokenizer(), method="full", budget=None, shadow=1.0) as server:
        name = server.create(DOCUMENT)
        for number in range(20):
            server.says(QUESTION, context_id=name, max_tokens=1 + number % 3)
            settled(server)
        assert compared(server) == 20
        assert server.metric("kvfold_shadow_loss") < 1e-6
        assert server.metric("kvfold_shadow_e_value") == 1
        assert server.metric("kvfold_certificate_holds") == 1


def test_a_method_that_is_wrong_by_design_is_told_once_without_a_text(model, caplog):
    options = {"method": "keep_middle", "budget": 4, "shadow": 1.0, "shadow_tolerance": 1e-6}
    with (
        registered("tests.helpers.keep_middle"),
        running(model, word_tokenizer(), **options) as server,
    ):
        name = server.create(DOCUMENT)
        with caplog.at_level(logging.DEBUG, "kvfold"):
            for _ in range(20):
                server.says(QUESTION, context_id=name)
                settled(server)
        assert server.metric("kvfold_certificate_holds") == 0
        assert server.metric("kvfold_shadow_e_value") >= 10
        told = [line.getMessage() for line in caplog.records if "certificate" in line.getMessage()]
        assert len(told) == 1 and "above the tolerance of 1e-06" in told[0]
        shown = server.http.get("/metrics").text + caplog.text
        assert QUESTION not in shown and DOCUMENT[:20] not in shown


@pytest.mark.slow
def test_an_answer_waits_for_the_server_to_be_idle(model):
    with running(model, word_tokenizer(), shadow=1.0) as server, ThreadPoolExecutor(2) as pool:
        name, shadows = server.create(DOCUMENT), server.engine.shadows
        with braked(model) as brake:
            first = pool.submit(server.chat, QUESTION, context_id=name)
            until(lambda: server.engine.workers.running == 1)
            second = pool.submit(server.chat, QUESTION, context_id=name)
            until(lambda: server.engine.workers.waiting == 1)
            assert compared(server) == 0
            brake.go.set()
            assert first.result().status_code == second.result().status_code == 200
        until(lambda: compared(server) == 2)
        # One that has begun is put back when a request comes.
        with braked(model) as brake:
            brake.go.set()
            server.says(QUESTION, context_id=name)
            brake.go.clear()
            until(lambda: not shadows.waiting)
            coming = pool.submit(server.chat, QUESTION, context_id=name)
            until(lambda: server.engine.workers.running == 1)
            assert compared(server) <= 3
            brake.go.set()
            assert coming.result().status_code == 200
        until(lambda: compared(server) == 4)
        assert sum(shadows.skipped.values()) == 0


def test_what_cannot_be_compared_is_counted_by_reason(model, caplog):
    with running(model, word_tokenizer(), shadow=1.0) as server:
        name = server.create(DOCUMENT)

        def skipped(reason: str) -> float:
            return server.metric(f'kvfold_shadow_skipped_total{{reason="{reason}"}}')

        server.says(QUESTION, prefix_cache=False)
        assert skipped("uncompressed") == 1
        body = {"id": "agent", "text": DOCUMENT}
        assert server.http.post("/v1/sessions", json=body).status_code == 201
        server.says(QUESTION, session_id="agent")
        assert skipped("session") == 1
        contexts = server.engine.contexts
        memory, contexts.memory = contexts.memory, contexts.nbytes + 1000
        for times in (1, 2):
            server.says(QUESTION, context_id=name)
            until(lambda times=times: skipped("memory") == times)
        assert ["nobody watches" in said for said in caplog.messages].count(True) == 1
        contexts.memory = memory
        assert compared(server) == 0
        server.says(QUESTION, context_id=name)
        until(lambda: compared(server) == 1)
        held = sum(each.size for each in contexts.all() if each.value is not None)
        until(lambda: contexts.nbytes == held)


def test_one_in_two_is_the_same_one_each_time_and_without_a_share_nothing_runs(model):
    def drawn() -> list[bool]:
        with running(model, word_tokenizer(), shadow=0.5) as server:
            return [server.engine.shadows.sampled() for _ in range(200)]

    first = drawn()
    assert first == drawn() and 70 < sum(first) < 130
    with running(model, word_tokenizer()) as server:
        assert server.engine.shadows is None
        assert "kvfold_shadow" not in server.http.get("/metrics").text
        assert not [each for each in threading.enumerate() if "shadows" in each.name]


def test_predictions_that_are_no_numbers_count_as_the_largest_loss(model, monkeypatch):
    monkeypatch.setattr(ShadowReader, "loss", lambda *_: math.nan)
    with running(model, word_tokenizer(), shadow=1.0, shadow_tolerance=0.5) as server:
        name = server.create(DOCUMENT)
        server.says(QUESTION, context_id=name)
        until(lambda: compared(server) == 1)
        assert server.metric("kvfold_shadow_loss") == 1


def test_an_answer_that_fails_while_it_is_generated_is_counted(model):
    """Its loss may be among the highest, as users leave bad answers."""
    with running(model, word_tokenizer(), shadow=1.0) as server:
        shadows = server.engine.shadows
        with pytest.raises(ZeroDivisionError), answering(shadows):
            raise ZeroDivisionError
        with answering(None):
            pass
        assert shadows.skipped["unanswered"] == 1
