# SPDX-License-Identifier: Apache-2.0
"""A client of endpoints: what is asked, and one clear line for what cannot be."""

from __future__ import annotations

import json
import socket
from email.message import Message
from io import BytesIO
from unittest.mock import patch
from urllib.error import HTTPError

import pytest

from kvfold.checks.engines import client
from kvfold.checks.engines.client import Endpoint, key_of, split_address
from kvfold.checks.engines.tokens import TopTokens
from kvfold.errors import KvfoldError
from tests.helpers.stub_endpoint import served

ASK = [{"role": "user", "content": "x"}]


def known(_: str) -> dict[str, float]:
    return {"a": 0.75, " b": 0.25}


def test_the_only_model_is_asked_for_as_many_tokens_as_are_allowed() -> None:
    with served(known, top=5) as url:
        endpoint = Endpoint.of(url, None, ASK)
        assert (endpoint.url, endpoint.model, endpoint.top) == (f"{url}/v1", "m", 5)
        found = endpoint.top_tokens(ASK)
    assert found.probabilities == {b"a": pytest.approx(0.75), b" b": pytest.approx(0.25)}


def test_models_are_named_behind_the_address() -> None:
    with served(known, models=("one", "two")) as url:
        assert Endpoint.of(f"{url}/v1/#two", None, ASK).model == "two"
        with pytest.raises(KvfoldError, match=f"serves one, two: name one, as {url}/v1#one"):
            Endpoint.of(url, None, ASK)
        with pytest.raises(KvfoldError, match="serves no model 'three'; it serves: one, two"):
            Endpoint.of(f"{url}#three", None, ASK)


def test_a_key_is_sent_and_never_said() -> None:
    with served(known, key="secret") as url:
        assert Endpoint.of(url, "secret", ASK).model == "m"
        with pytest.raises(KvfoldError, match="answers 401: wrong key") as refused:
            Endpoint.of(url, "other-key", ASK)
    assert "other-key" not in str(refused.value)


def test_a_key_that_a_server_repeats_is_not_said() -> None:
    repeated = {"error": {"message": "no such key: Bearer other-key\x1b]0;owned"}}
    error = HTTPError("http://a", 401, "no", Message(), BytesIO(json.dumps(repeated).encode()))
    with (
        patch("urllib.request.OpenerDirector.open", side_effect=error),
        pytest.raises(KvfoldError, match="no such key: Bearer … ]0;owned") as refused,
    ):
        Endpoint.of("http://a", "other-key", ASK)
    assert "other-key" not in str(refused.value)


@pytest.mark.parametrize(
    "listed", [["a"], {"a": -0.1}, [{"token": "a", "logprob": 10**400}], [{"token": "a"}], "a"]
)
def test_log_probabilities_of_another_form_are_refused(listed: object) -> None:
    answer = {"choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}]}
    with pytest.raises(KvfoldError, match="gives no log probabilities"):
        TopTokens.of(answer, "http://a")


def test_what_is_no_number_of_tokens_is_not_compared() -> None:
    top = [{"token": "a", "logprob": -0.1, "bytes": 3}]
    choices = [{"logprobs": {"content": [{"top_logprobs": top}]}}]
    for read in ("5", True, 5.0, 0):
        found = TopTokens.of({"choices": choices, "usage": {"prompt_tokens": read}}, "http://a")
        assert found.read is None and list(found.probabilities) == [b"a"]


@pytest.mark.parametrize("given", ["http://a..b/v1", f"http://{'a' * 70}/v1", "http://a/\u00fc"])
def test_what_is_no_address_is_one_line(given: str) -> None:
    with pytest.raises(KvfoldError, match="is no address"):
        split_address(given)


def test_a_busy_endpoint_is_asked_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BytesIO):
        length = None

    def busy(status: int) -> HTTPError:
        return HTTPError("http://a", status, "no", Message(), BytesIO())

    waited: list[float] = []
    monkeypatch.setattr(client.time, "sleep", waited.append)
    answers = [busy(503), busy(429), Answer(b"{}")]
    with patch("urllib.request.OpenerDirector.open", side_effect=answers):
        assert client._answer("http://a", None) == {}
    assert waited == [1, 2]
    always = [busy(429) for _ in range(5)]
    with (
        patch("urllib.request.OpenerDirector.open", side_effect=always),
        pytest.raises(KvfoldError, match="answers 429: no"),
    ):
        client._answer("http://a", None)
    assert waited == [1, 2, 1, 2, 4, 8]


def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        length = None

        def read1(self, _: int) -> bytes:
            return b" " * 1000

    monkeypatch.setattr(client, "LONGEST", 5000)
    with pytest.raises(KvfoldError, match="answers more than"):
        client._read(Endless(), "http://a")
    monkeypatch.setattr(client, "LONGEST", 1 << 40)
    monkeypatch.setattr(client, "PATIENCE", 0)
    with pytest.raises(KvfoldError, match="has not answered within 0 s"):
        client._read(Endless(), "http://a")


def test_an_answer_that_is_cut_off_is_told_from_one_that_is_no_json() -> None:
    class Cut(BytesIO):
        length = 60

    with pytest.raises(KvfoldError, match="hung up after 12 of 60 bytes"):
        client._read(Cut(b'{"choices": '), "http://a")
    assert client._read(Cut(b" " * 60), "http://a") == b" " * 60


def test_a_model_s_name_may_hold_a_space() -> None:
    assert split_address("http://a:1/v1#My Model") == ("http://a:1/v1", "My Model")


def test_a_reference_elsewhere_does_not_get_the_endpoints_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "one")
    monkeypatch.delenv("REFERENCE_API_KEY", raising=False)
    assert key_of("http://a:1/v1") == "one" == key_of("http://a:1", "http://a:1/v1")
    assert key_of("http://b:1", "http://a:1") is None
    monkeypatch.setenv("REFERENCE_API_KEY", "two")
    assert key_of("http://b:1", "http://a:1") == "two"


def test_what_gives_no_log_probabilities_is_refused() -> None:
    with served(known, top=0) as url, pytest.raises(KvfoldError) as refused:
        Endpoint.of(url, None, ASK)
    assert "answers 400: at most 0 log probabilities; a check needs" in str(refused.value)
    nothing = {"choices": [{"logprobs": None}]}
    with (
        served(known, change=lambda _: nothing) as url,
        pytest.raises(KvfoldError, match="gives no log probabilities"),
    ):
        Endpoint.of(url, None, ASK)


def test_no_server_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(KvfoldError, match=r"/v1/models does not answer: .*refused"):
            Endpoint.of(url, None, ASK)


@pytest.mark.parametrize("wrong", ["http://", "http://u:p@h/v1", "http://h:x", "http://h?key=1"])
def test_addresses_that_cannot_be_are_refused(wrong: str) -> None:
    with pytest.raises(KvfoldError, match="address") as refused:
        split_address(wrong)
    assert "u:p" not in str(refused.value)
