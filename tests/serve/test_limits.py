# SPDX-License-Identifier: Apache-2.0
"""What bounds a client: each limit of docs/serving-settings.md is driven to where it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import KvfoldError
from kvfold.serve.bodies import ValueCounter
from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError
from kvfold.serve.limits import check_client
from kvfold.serve.request_schemas import MOST_CHARACTERS, MOST_ENTRIES
from kvfold.serve.settings import ServerSettings
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.serving import (
    CHAT,
    CONTEXTS,
    TEXT,
    Running,
    assert_clean,
    chat,
    completion,
    post,
    running,
)
from tests.helpers.tokenizers import word_tokenizer

VALUES = 40_000


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    with running(model, word_tokenizer(), values=VALUES, answer_tokens=8) as made:
        yield made


@pytest.fixture(scope="module")
def restricted(model: Any) -> Iterator[Running]:
    # The default one is taken too.
    with running(model, word_tokenizer(), method="snapkv", methods=("full",)) as made:
        yield made


def test_the_table_of_bounds_says_the_defaults():
    table = (Path(__file__).parents[2] / "docs" / "serving-settings.md").read_text()
    table = table[table.index("## Limits\n") : table.index("## Metrics")]
    own = ServerSettings()
    for name in (
        "connections", "contexts", "values", "answer_tokens", "prefill_chunk", "grace",
        "client_timeout",
    ):  # fmt: skip
        assert f"`--{name.replace('_', '-')}`, {int(getattr(own, name))}" in table, name
    assert f"`--workers` + `--queue`, {own.workers} + {own.queue}" in table
    assert (own.memory, own.body) == (4 * 2**30, 32 * 2**20)
    assert "`--memory`, 4GiB" in table and "`--body`, 32MiB" in table
    assert f"{MOST_ENTRIES}; stop" in table and f"a stop string: {MOST_CHARACTERS}" in table


def test_a_method_that_reads_at_once_is_served_by_default(model):
    with running(model, word_tokenizer(), prefill_chunk=16) as server:
        for method in ("pyramidinfer", "snapkv"):
            server.create(DOCUMENT, method=method, budget=None if method != "snapkv" else 40)


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('a"\\,[{é\n', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\', max_size=2), inner),
    max_leaves=12,
)


def values_of(found: Any) -> int:
    """Texts, and marks that part or open: what a reader of the whole counts."""
    if isinstance(found, str):
        return 1
    if isinstance(found, list):
        return 1 + max(0, len(found) - 1) + sum(map(values_of, found))
    if isinstance(found, dict):
        inside = sum(1 + values_of(value) for value in found.values())
        return 1 + max(0, len(found) - 1) + inside
    return 0


@given(JSON, st.booleans(), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_values_are_counted_wherever_a_body_is_cut(found, ascii_only, size):
    body = json.dumps(found, ensure_ascii=ascii_only).encode()
    values = ValueCounter(10**6)
    for start in range(0, len(body), size):
        values.feed(body[start : start + size])
    assert values.count == values_of(found)


MANY = {
    CHAT: b'{"model": "tiny", "messages": [%s0]}',
    TEXT: b'{"model": "tiny", "prompt": [%s0]}',
    CONTEXTS: b'{"text": [%s0]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("path", MANY)
@pytest.mark.parametrize("value", [b"0,", b"{},", b'"",', b'{"a":1},', b"[[[]]],"])
def test_a_body_of_more_values_is_refused_before_it_is_parsed(server, path, value):
    within, beyond = (MANY[path] % (value * count) for count in (VALUES // 10, VALUES))
    assert post(server, path, within).status_code in (200, 400)
    assert_clean(post(server, path, beyond), 413, f"more than the {VALUES} values")


@pytest.mark.parametrize("path", MANY)
def test_others_are_answered_while_a_large_body_is_refused(model, path):
    with running(model, word_tokenizer()) as server, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(post, server, path, MANY[path] % (b"0," * (2 * 2**20)))
        longest = 0.0
        while not sent.done():
            started = time.perf_counter()
            assert server.http.get("/health").status_code == 200
            longest = max(longest, time.perf_counter() - started)
        assert_clean(sent.result(), 413, "values")
        assert longest < 1


def test_lists_and_texts_that_are_not_read_have_a_length(server):
    message = {"role": "user", "content": QUESTION}
    part = {"type": "text", "text": "a"}
    long = "a" * (MOST_CHARACTERS + 1)
    for path, body in (
        (CHAT, chat(messages=[message] * (MOST_ENTRIES + 1))),
        (CHAT, chat(messages=[{"role": "user", "content": [part] * (MOST_ENTRIES + 1)}])),
        (CHAT, chat(stop=long)),
        (CHAT, chat(stop=[long])),
        (TEXT, completion(stop=["a"] * 17)),
        (CONTEXTS, {"text": "a", "method": long}),
        (CONTEXTS, {"text": "a", "budget": "1" * 51}),
    ):
        assert_clean(server.http.post(path, json=body), 400, "at most")


def test_what_was_wrong_is_not_sent_back_whole(server):
    for body in (chat(model="a" * 10**5), chat(**{"b" * 10**5: 1})):
        answered = server.http.post(CHAT, json=body)
        assert answered.status_code in (400, 404) and len(answered.content) < 10**4


def test_every_path_but_those_of_watchers_asks_for_the_key(model):
    with running(model, word_tokenizer(), api_key="right") as server:
        for path in ("/openapi.json", "/v1/models", "/none", "/v2/none"):
            assert_clean(server.http.get(path), 401, "API key")
        for path in ("/health", "/ready", "/metrics"):
            assert server.http.get(path).status_code == 200
        key = {"Authorization": "Bearer right", "Origin": "http://elsewhere.example"}
        assert server.http.get("/openapi.json", headers=key).status_code == 200


def test_web_pages_of_other_sites_are_refused(server):
    file = {"file": ("a.txt", b"the sky is blue")}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        for headers in ({"Origin": origin}, {"Origin": origin, "Host": "127.0.0.1"}):
            refused = server.http.post(CONTEXTS, files=file, headers=headers)
            assert_clean(refused, 403, "other sites")
    # A name that its owner made to point here, with itself as the origin.
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert_clean(server.http.post(CONTEXTS, files=file, headers=rebound), 403, "Host names another")
    own = {"Origin": server.url}
    made = server.http.post(CONTEXTS, files=file, data={"budget": "2"}, headers=own)
    assert made.status_code != 403
    for name in ("localhost:8000", "[::1]:8000", "127.0.0.1", "server"):
        assert server.http.get("/v1/models", headers={"Host": name}).status_code == 200


def test_an_origin_that_is_none_and_a_mapped_address_are_seen_through():
    here = ("127.0.0.1", 8000)
    with pytest.raises(ApiError, match="other sites"):
        check_client({b"host": b"localhost:8000", b"origin": b"http://["}, here, None)
    with pytest.raises(ApiError, match="Host names another"):
        check_client({b"host": b"evil.example"}, ("::ffff:127.0.0.1", 8000), None)
    check_client({b"host": b"localhost:8000"}, ("::ffff:127.0.0.1", 8000), None)


def test_values_are_counted_whatever_a_second_content_type_says(server):
    body = json.dumps({"text": "x", "metadata": [[]] * 300_000}).encode()
    types = [("Content-Type", "application/json"), ("Content-Type", "multipart/form-data")]
    answer = server.http.post("/v1/contexts", content=body, headers=types)
    assert answer.status_code == 413 and "too_many_values" in answer.text


def test_json_is_utf_8_in_which_its_values_were_counted(server):
    body = json.dumps({"text": "the sky is blue"}).encode("utf-16")
    assert post(server, "/v1/contexts", body).status_code in (400, 422)


@pytest.mark.slow
def test_contexts_are_listed_a_page_at_a_time(model):
    with running(model, word_tokenizer()) as server:
        made = {server.create(f"{DOCUMENT} {QUESTION}", budget=40) for _ in range(5)}
        found: list[str] = []
        for more in (True, True, False):
            after = {"after": found[-1]} if found else {}
            page = server.http.get(CONTEXTS, params={"limit": 2, **after}).json()
            assert page["has_more"] is more and len(page["data"]) == (2 if more else 1)
            found += [one["id"] for one in page["data"]]
            # Use changes nothing.
            server.says(QUESTION, context_id=found[0])
        assert set(found) == made
        for wrong, status in (("limit=0", 400), ("limit=1001", 400), ("after=none", 404)):
            assert_clean(server.http.get(f"{CONTEXTS}?{wrong}"), status)


@pytest.mark.parametrize(
    "method",
    [
        "streaming_llm:sinks=1000000000",
        "snapkv:window=99999999999999999999",
        "snapkv:window=9223372036854775808",
        "kivi:group=99999999999999999999",
        "knorm:skip_layers=99999999999999999999",
    ],
)
def test_numbers_in_a_method_take_neither_memory_nor_time(server, method):
    started = time.perf_counter()
    answered = server.http.post(
        CONTEXTS, json={"text": "the sky is blue", "method": method, "budget": 2}
    )
    assert_clean(answered, 400)
    assert time.perf_counter() - started < 5


def test_a_kernel_wider_than_the_text_takes_no_time(server):
    text, method = "the sky is blue " * 20, "auto:kernel=1000000001"
    made = server.http.post(CONTEXTS, json={"text": text, "method": method})
    assert made.status_code == 201


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "status"),
    [
        (None, 201),
        ("snapkv", 201),
        ("snapkv_official:window=8", 201),
        ("full", 201),
        ("snapkv + kivi", 400),
        ("h2o", 400),
        ("kvzip:chunk=1", 400),
    ],
)
def test_a_server_takes_the_methods_it_was_told_to(restricted, method, status):
    body = {"text": "the sky is blue " * 30, "method": method}
    answered = restricted.http.post(CONTEXTS, json=body)
    assert answered.status_code == status, answered.text
    if status == 400:
        assert_clean(answered, 400, "this server takes full, snapkv")


def test_clients_may_not_name_files_on_the_server(server, tmp_path):
    method = f"kvzip:level=head,head_scores={tmp_path / 'heads.pt'}"
    for body in (method, f"{method} + kivi"):
        answered = server.http.post(CONTEXTS, json={"text": "the sky is blue", "method": body})
        assert_clean(answered, 400, "kvzip:head_scores names a file, which clients may not")


def test_a_method_that_no_server_has_is_refused_at_the_start(model):
    with pytest.raises(KvfoldError, match="unknown method 'snapkb'"):
        Engine("tiny", model, word_tokenizer(), ServerSettings(methods=("snapkb",)))


@pytest.mark.parametrize("temperature", [1e-7, 1e-38, 1e-45, 5e-324])
def test_the_lowest_temperature_draws_the_likeliest_token(server, temperature):
    greedy = server.http.post(CHAT, json=chat(temperature=0, max_tokens=8)).json()
    drawn = server.http.post(CHAT, json=chat(temperature=temperature, max_tokens=8))
    assert drawn.status_code == 200
    assert drawn.json()["choices"][0]["message"] == greedy["choices"][0]["message"]


def test_the_smallest_part_of_the_probability_is_one_token(server):
    body = chat(temperature=2, top_p=5e-324, max_tokens=8)
    greedy = server.http.post(CHAT, json=chat(temperature=0, max_tokens=8)).json()
    drawn = server.http.post(CHAT, json=body).json()
    assert drawn["choices"][0]["message"] == greedy["choices"][0]["message"]
