# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of vLLM, with a vLLM that only notes what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvfold
from kvfold import Budget, KvfoldError
from kvfold.cli.serve_vllm import serve
from kvfold.jobs.compress import CompressOptions, worker_spec
from kvfold.jobs.executor import here
from kvfold.serve.vllm.arrivals import Arrivals
from kvfold.serve.vllm.catalog import ContextCatalog
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.launch import VllmOptions, started
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
from kvfold.serve.vllm.proxy import Proxy, ProxyAuth, build
from tests.helpers.chats import chat_tokenizer
from tests.helpers.contexts import DOCUMENT, KIVI, new_model
from tests.helpers.tokenizers import word_tokenizer

LONGEST, LARGEST, KEY = 200, 5000, "secret"
DOCUMENT_TOKENS = 151
CHAT = {"model": "m", "context_id": "a", "messages": [{"role": "user", "content": "the sky is"}]}
TEXT = {"model": "m", "context_id": "a", "prompt": "the sky is"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def context(tokenizer: Any) -> kvfold.Context:
    return kvfold.compress(new_model(), tokenizer, DOCUMENT, "snapkv", 40)


@pytest.fixture(scope="module")
def contexts(
    context: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> ContextCatalog:
    """`a` can be asked, `packed` and `stranger` cannot."""
    folder = tmp_path_factory.mktemp("contexts")
    model = context.model
    context.save(folder / "a.kvfold")
    kvfold.compress(model, tokenizer, DOCUMENT, KIVI).save(folder / "packed.kvfold")
    other = new_model(seed=3)
    kvfold.compress(other, tokenizer, DOCUMENT, "snapkv", 40).save(folder / "stranger.kvfold")
    model.save_pretrained(folder / "model")
    served_folder = ServedFolder(folder)
    compatibility = CompatibilityCheck(
        served_folder, MetaModel(model.config, str(folder / "model")), "float32"
    )
    return ContextCatalog(served_folder, compatibility, tokenizer)


class Fake:
    """A vLLM behind the proxy: what it was sent, and what it answers."""

    def __init__(
        self, contexts: ContextCatalog, key: str | None = None, arrivals: Any = None
    ) -> None:
        self.seen: list[httpx.Request] = []
        self.catalog = contexts
        self.size = 2**20
        self.answer: Callable[[httpx.Request], httpx.Response] = lambda _: completion()
        client = httpx.AsyncClient(
            base_url="http://vllm", transport=httpx.MockTransport(self._answered)
        )
        self.app = build(Proxy(contexts, client, ProxyAuth(key, LARGEST), LONGEST, arrivals))

    def _answered(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        made = self.answer(request)
        # As from a connection: not read yet.
        return httpx.Response(
            made.status_code, headers=made.headers, content=_bytes(made.content, self.size)
        )

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        """What a client gets."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                return await client.request(method, path, **content)

        return asyncio.run(asked())

    @property
    def sent(self) -> Any:
        """The last body that vLLM got."""
        return json.loads(self.seen[-1].content)


@pytest.fixture
def vllm(contexts: ContextCatalog) -> Fake:
    return Fake(contexts)


async def _bytes(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, max(1, len(content)), size):
        yield content[start : start + size]


def piece(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"} | (
        {"choices": [choice]} | more
    )


def completion() -> httpx.Response:
    return httpx.Response(200, json=piece("blue", "stop", usage={"prompt_tokens": 43}))


def asked_by_kvfold(context: kvfold.Context, *turns: str) -> list[int]:
    """The tokens that `Chat` reads after the document."""
    chat = context.chat()
    while len(turns) > 1:
        chat.add(*turns[:2])
        turns = turns[2:]
    ids = [
        *chat.ids[0].tolist(),
        *chat.question_ids(turns[0], "", special_tokens=False)[0].tolist(),
    ]
    return ids[context.ids.shape[1] :]


@pytest.mark.slow
def test_a_question_becomes_the_tokens_that_the_library_reads(vllm, contexts, context):
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"temperature": 0.0, "seed": 4})
    served = contexts.served_folder.get("a")
    prompt = [*served.tokens, *asked_by_kvfold(context, "the sky is")]
    assert vllm.seen[-1].url.path == "/v1/completions"
    assert vllm.sent == {
        "model": "m",
        "prompt": prompt,
        "cache_salt": served.salt,
        "kv_transfer_params": {"kvfold_context": "a"},
        "max_tokens": LONGEST - len(prompt),
        "temperature": 0.0,
        "seed": 4,
    }
    assert answer.json() == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "blue"},
            }
        ],
        "usage": {"prompt_tokens": 43},
    }


def test_later_turns_are_those_of_the_library(vllm, contexts, context):
    turns = ("the sky is", "blue", "the grass is", "green here", "we go")
    roles = ("user", "assistant") * 3
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 7})
    after = vllm.sent["prompt"][contexts.served_folder.get("a").kept :]
    assert after == asked_by_kvfold(context, *turns)
    assert vllm.sent["max_tokens"] == 7


def test_a_stream_becomes_that_of_a_chat(vllm):
    events = [
        piece("bl"),
        piece("ue", "stop"),
        piece("", usage={"total_tokens": 5}) | {"choices": []},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    vllm.answer = lambda _: httpx.Response(200, text=lines)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | options)
    assert vllm.sent["stream"] is True and vllm.sent["stream_options"] == {"include_usage": True}
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, done, end = answer.text.split("\n\n")
    first, second, last = (json.loads(event.removeprefix("data: ")) for event in found)
    assert done == "data: [DONE]" and end == ""
    assert first["object"] == "chat.completion.chunk" and first["id"] == "chatcmpl-1"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "bl"}
    assert second["choices"][0]["delta"] == {"content": "ue"}
    assert second["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == [] and last["usage"] == {"total_tokens": 5}


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\x85d", "a\x1cb\x0bc", "é" * 9])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_stream_is_parted_at_line_feeds_only(vllm, text, ascii_only):
    lines = f"data: {json.dumps(piece(text, 'stop'), ensure_ascii=ascii_only)}\n\ndata: [DONE]\n\n"
    vllm.answer = lambda _: httpx.Response(200, text=lines)
    vllm.size = 3
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
    # In one line for any client, wherever it ends lines.
    only, done = (line for line in answer.text.splitlines() if line)
    assert json.loads(only.removeprefix("data: "))["choices"][0]["delta"]["content"] == text
    assert done == "data: [DONE]"


def test_an_altered_file_is_refused_before_vllm_fails(context, tokenizer, tmp_path):
    file = tmp_path / "a.kvfold"
    context.save(file)
    context.model.save_pretrained(tmp_path / "model")
    served_folder = ServedFolder(tmp_path)
    compatibility = CompatibilityCheck(
        served_folder, MetaModel(context.model.config, str(tmp_path / "model")), "float32"
    )
    vllm = Fake(ContextCatalog(served_folder, compatibility, tokenizer))
    assert vllm.ask("POST", "/v1/chat/completions", json=CHAT).status_code == 200
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = vllm.ask("POST", "/v1/chat/completions", json=CHAT)
    assert refused.status_code == 400 and "is damaged" in refused.json()["error"]["message"]
    (listed,) = vllm.ask("GET", "/v1/contexts").json()["data"]
    assert "is damaged" in listed["refused"]
    context.save(file)
    assert vllm.ask("POST", "/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize("prompt", ["the sky is", [3, 7, 5], ["the sky is"], [[3, 7, 5]]])
def test_a_completion_goes_on_from_the_document(vllm, contexts, prompt):
    answer = vllm.ask("POST", "/v1/completions", json=TEXT | {"prompt": prompt})
    after = vllm.sent["prompt"][contexts.served_folder.get("a").kept :]
    assert after == [3, 7, 5] and vllm.sent["max_tokens"] == 16
    assert answer.json() == json.loads(completion().content)


def test_what_names_no_context_passes_unchanged(vllm):
    vllm.answer = lambda request: httpx.Response(
        418, content=b"\x00tea", headers={"x-own": "1", "content-type": "a/b"}
    )
    for method, path, body in (
        ("POST", "/v1/chat/completions", b'{"messages": [], "tools": [1]}'),
        ("POST", "/v1/completions", b"no json"),
        ("GET", "/v1/models?x=%20y", b""),
        ("DELETE", "/some/thing%2F", b""),
    ):
        answer = vllm.ask(method, path, content=body, headers={"x-mine": "2"})
        sent = vllm.seen[-1]
        assert (sent.method, sent.content) == (method, body)
        assert str(sent.url) == f"http://vllm{path}"
        assert sent.headers["x-mine"] == "2"
        assert (answer.status_code, answer.content) == (418, b"\x00tea")
        assert answer.headers["x-own"] == "1" and answer.headers["content-type"] == "a/b"


@pytest.mark.parametrize(
    "changes, status, named",
    [
        ({"context_id": "none"}, 404, "there is no context 'none'"),
        ({"context_id": "../a"}, 400, "context_id"),
        ({"context_id": 5}, 400, "context_id"),
        ({"context_id": "packed"}, 400, "stores entries encoded"),
        ({"context_id": "stranger"}, 400, "but other weights"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"n": 2}, 400, "n"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "with no system message"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(vllm, changes, status, named):
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | changes)
    assert answer.status_code == status
    assert named in json.dumps(answer.json()["error"])
    assert vllm.seen == []


@pytest.mark.parametrize("headers", [{}, {"X-Kvfold-Session": "a"}])
def test_sessions_are_refused_by_field_and_by_header(vllm, headers):
    body = CHAT if headers else CHAT | {"session_id": "a"}
    answer = vllm.ask("POST", "/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400 and "no sessions" in answer.json()["error"]["message"]
    assert vllm.seen == []


@pytest.mark.parametrize("prompt", ["", [], [12]])
def test_prompts_that_are_none_are_refused(vllm, prompt):
    assert vllm.ask("POST", "/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 400
    assert vllm.seen == []


def test_what_vllm_refuses_is_passed_on(vllm):
    body = {"error": {"message": "too long"}}
    vllm.answer = lambda _: httpx.Response(400, json=body)
    for stream in (False, True):
        answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"stream": stream})
        assert (answer.status_code, answer.json()) == (400, body)


def test_a_vllm_that_cannot_be_reached_is_a_503(vllm):
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    vllm.answer = unreachable
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/models", {})):
        answer = vllm.ask("POST", path, json=body)
        assert answer.status_code == 503 and "cannot be reached" in answer.text


def test_contexts_are_listed_with_what_they_keep_or_why_not(vllm, contexts):
    packed, fine, stranger = sorted(
        vllm.ask("GET", "/v1/contexts").json()["data"], key=lambda about: about["id"] != "packed"
    )
    assert fine == {"id": "a", "object": "context", "tokens": DOCUMENT_TOKENS, "kept": 40}
    assert "stores entries encoded" in packed["refused"]
    assert "other weights" in stranger["refused"]


def test_the_key_and_the_size_are_checked(contexts):
    vllm = Fake(contexts, KEY)
    right = {"Authorization": f"Bearer {KEY}"}
    for headers in ({}, {"Authorization": KEY}, {"Authorization": "Bearer other"}):
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/contexts"),
            ("POST", "/invocations"),
            ("POST", "/tokenize"),
            ("GET", "/version"),
            ("GET", "/openapi.json"),
        ):
            assert vllm.ask(method, path, json=CHAT, headers=headers).status_code == 401
    assert vllm.seen == []
    assert vllm.ask("POST", "/v1/chat/completions", json=CHAT, headers=right).status_code == 200
    assert vllm.seen[-1].headers["authorization"] == f"Bearer {KEY}"
    assert vllm.ask("GET", "/health").status_code == 200
    assert vllm.ask("GET", "/metrics").status_code == 200
    assert vllm.ask("POST", "/tokenize", json={}, headers=right).status_code == 200
    large = json.dumps(CHAT | {"user": "x" * LARGEST})
    answer = vllm.ask("POST", "/v1/chat/completions", content=large, headers=right)
    assert answer.status_code == 413


def test_pages_of_other_sites_are_refused_without_a_key(vllm):
    foreign = {"Origin": "https://elsewhere.example"}
    for method, path in (("POST", "/v1/contexts"), ("POST", "/tokenize"), ("GET", "/openapi.json")):
        assert vllm.ask(method, path, json=CHAT, headers=foreign).status_code == 403
    assert vllm.seen == []


def test_a_body_that_does_not_end_is_given_up(contexts):
    vllm = Fake(contexts)
    auth = ProxyAuth(None, LARGEST, timeout=0.05)
    vllm.app = build(Proxy(contexts, httpx.AsyncClient(), auth, LONGEST))

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    answer = vllm.ask("POST", "/v1/chat/completions", content=half())
    assert answer.status_code == 408 and not vllm.seen


def test_many_values_are_refused_and_deep_ones_are_vllm_s_own_business(vllm, contexts):
    refused = vllm.ask("POST", "/v1/completions", content=b"[" + b"0," * 2400 + b"0]")
    assert refused.status_code == 200
    vllm.app = build(Proxy(contexts, httpx.AsyncClient(), ProxyAuth(None, LARGEST, 1000), LONGEST))
    refused = vllm.ask("POST", "/v1/completions", content=b"[" + b"0," * 2400 + b"0]")
    assert refused.status_code == 413 and "1000 values" in refused.text


def test_another_vocabulary_is_refused(contexts, tokenizer):
    other = word_tokenizer()
    other.add_tokens(["more"])
    vllm = Fake(ContextCatalog(contexts.served_folder, contexts.compatibility, other))
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400 and "another vocabulary" in answer.text


@pytest.fixture
def arriving(contexts, context, tokenizer, tmp_path_factory):
    """A vLLM before which texts are compressed."""
    options = CompressOptions(kvfold.parse("snapkv"), Budget.of(40), None, "at_end", 0)
    run = here(worker_spec("none"), context.model, tokenizer)
    return Fake(contexts, arrivals=Arrivals(contexts.served_folder.folder, options, run, ""))


def test_a_text_in_a_request_is_asked_as_its_context_is(arriving, contexts):
    own = {key: value for key, value in CHAT.items() if key != "context_id"}
    texts = arriving.ask("POST", "/v1/chat/completions", json=own | {"context": DOCUMENT})
    named = arriving.ask("POST", "/v1/chat/completions", json=CHAT)
    assert texts.status_code == named.status_code == 200
    sent, expected = (json.loads(request.content) for request in arriving.seen)
    assert sent["prompt"] == expected["prompt"] and len(sent["prompt"]) > 40
    # The same text with the same method and budget makes the same file.
    assert sent["cache_salt"] == expected["cache_salt"] == contexts.served_folder.get("a").salt
    assert sent["kv_transfer_params"] != expected["kv_transfer_params"]
    plain = {key: value for key, value in TEXT.items() if key != "context_id"}
    answer = arriving.ask("POST", "/v1/completions", json=plain | {"context": DOCUMENT})
    assert answer.status_code == 200
    assert json.loads(arriving.seen[-1].content)["cache_salt"] == sent["cache_salt"]


def test_a_new_context_is_made_and_listed(arriving):
    made = arriving.ask("POST", "/v1/contexts", json={"text": DOCUMENT, "id": "new"})
    assert made.status_code == 201 and made.json()["kept"] == 40
    again = arriving.ask("POST", "/v1/contexts", json={"text": DOCUMENT, "id": "new"})
    assert again.status_code == 409
    listed = arriving.ask("GET", "/v1/contexts").json()["data"]
    assert made.json() in listed
    asked = arriving.ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "new"})
    assert asked.status_code == 200


def test_an_id_that_unnamed_texts_have_is_refused(arriving):
    name = f"auto-{'0' * 32}"
    made = arriving.ask("POST", "/v1/contexts", json={"text": DOCUMENT, "id": name})
    assert made.status_code == 400 and made.json()["error"]["param"] == "id"
    listed = arriving.ask("GET", "/v1/contexts").json()["data"]
    assert name not in [one["id"] for one in listed]


@pytest.fixture
def levelling(context, tokenizer, tmp_path):
    """A vLLM without pages of single heads, and the context `uneven`; both come levelled."""
    uneven = kvfold.compress(context.model, tokenizer, DOCUMENT, "pyramidkv", 40)
    uneven.save(tmp_path / "uneven.kvfold")
    context.model.save_pretrained(tmp_path / "model")
    served_folder = ServedFolder(tmp_path)
    meta_model = MetaModel(context.model.config, str(tmp_path / "model"))
    compatibility = CompatibilityCheck(served_folder, meta_model, "float32")
    catalog = ContextCatalog(served_folder, compatibility, tokenizer, reads=True)
    budget = Budget.of(40)
    options = CompressOptions(kvfold.parse("kvzip"), budget, None, "at_end", 0, level="votes")
    run = here(worker_spec("none"), context.model, tokenizer)
    arrivals = Arrivals(tmp_path, options, run, "", "votes")
    return Fake(catalog, arrivals=arrivals), uneven, served_folder


@pytest.fixture
def paging(context, tokenizer, tmp_path):
    """A vLLM with pages of single heads, and the context `uneven`; both come in pages of 16."""
    uneven = kvfold.compress(context.model, tokenizer, DOCUMENT, "pyramidkv", 60)
    uneven.save(tmp_path / "uneven.kvfold")
    context.model.save_pretrained(tmp_path / "model")
    served_folder = ServedFolder(tmp_path, Paged(16))
    meta_model = MetaModel(context.model.config, str(tmp_path / "model"))
    compatibility = CompatibilityCheck(served_folder, meta_model, "float32")
    catalog = ContextCatalog(served_folder, compatibility, tokenizer, reads=True)
    method = kvfold.parse("kvzip + pages:size=16")
    options = CompressOptions(method, Budget.of(60), None, "at_end", 0)
    run = here(worker_spec("none"), context.model, tokenizer)
    return Fake(catalog, arrivals=Arrivals(tmp_path, options, run, "", 16)), uneven, served_folder


def numbers_of_pages(made):
    """Pages of 16 entries that the heads of a context fill, beside its last tokens."""
    rest = made.ids.shape[1] % 16
    counts = [count - rest for layer in made.stats().kept for count in layer[0]]
    assert not any(count % 16 for count in counts)
    return sum(counts) // 16


def test_a_text_is_compressed_into_pages_on_arrival(paging, context, tokenizer):
    vllm, _, served_folder = paging
    made = vllm.ask("POST", "/v1/contexts", json={"text": DOCUMENT, "id": "new"})
    own = kvfold.compress(context.model, tokenizer, DOCUMENT, "kvzip + pages:size=16", 60)
    assert made.status_code == 201 and "level" not in made.json()
    assert made.json()["pages"] == numbers_of_pages(own)
    assert made.json()["kept"] == served_folder.get("new").kept < DOCUMENT_TOKENS


def test_an_uneven_file_is_read_again_into_pages_when_it_is_first_asked(paging):
    vllm, uneven, served_folder = paging
    (listed,) = vllm.ask("GET", "/v1/contexts").json()["data"]
    assert "read again when it is first asked" in listed["uneven"]
    for _ in range(2):
        answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "uneven"})
        assert answer.status_code == 200
    first, second = (json.loads(request.content) for request in vllm.seen)
    assert first == second
    copy = served_folder.get(first["kv_transfer_params"]["kvfold_context"])
    assert copy.salt == first["cache_salt"] and copy.tokens == first["prompt"][: copy.kept]
    assert sum(map(sum, copy.pages.of_layers)) == numbers_of_pages(uneven.paged(16))
    assert len(served_folder.ids()) == 2


def test_a_file_that_takes_no_pages_is_refused(paging, context, tokenizer):
    vllm, _, served_folder = paging
    merged = kvfold.compress(context.model, tokenizer, DOCUMENT, "d2o", 40)
    merged.save(served_folder.folder / "merged.kvfold")
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "merged"})
    assert answer.status_code == 400 and "pages are made" in answer.json()["error"]["message"]
    assert not vllm.seen


def test_a_text_is_levelled_on_arrival_with_the_kl_in_its_record(levelling, context, tokenizer):
    vllm, _, served_folder = levelling
    made = vllm.ask("POST", "/v1/contexts", json={"text": DOCUMENT, "id": "new"})
    own = kvfold.compress(context.model, tokenizer, DOCUMENT, "kvzip", 40)
    expected = own.levelled("votes").level
    assert made.status_code == 201 and made.json()["level"] == expected.model_dump()
    assert expected.kl > 0 and served_folder.get("new").kept == expected.tokens


def test_an_uneven_file_is_levelled_when_it_is_first_asked(levelling):
    vllm, uneven, served_folder = levelling
    (listed,) = vllm.ask("GET", "/v1/contexts").json()["data"]
    assert "read again when it is first asked" in listed["uneven"]
    for _ in range(2):
        answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "uneven"})
        assert answer.status_code == 200
    first, second = (json.loads(request.content) for request in vllm.seen)
    assert first == second
    copy = served_folder.get(first["kv_transfer_params"]["kvfold_context"])
    expected = uneven.levelled("votes")
    assert copy.level == expected.level and copy.salt == first["cache_salt"]
    chosen = expected.cache.positions(0)[0][0]
    assert copy.tokens == expected.ids[0, chosen].tolist() == first["prompt"][: copy.kept]
    assert len(served_folder.ids()) == 2


def test_a_file_that_cannot_be_levelled_is_refused(levelling, context, tokenizer):
    vllm, _, served_folder = levelling
    merged = kvfold.compress(context.model, tokenizer, DOCUMENT, "d2o", 40)
    merged.save(served_folder.folder / "merged.kvfold")
    answer = vllm.ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "merged"})
    assert answer.status_code == 400 and "level" in answer.json()["error"]["message"]
    assert not vllm.seen


def test_an_uneven_file_is_refused_by_a_server_that_compresses_none(levelling):
    vllm, _, served_folder = levelling
    catalog = vllm.catalog
    plain = ContextCatalog(served_folder, catalog.compatibility, catalog.prompts.tokenizer)
    refused = Fake(plain).ask("POST", "/v1/chat/completions", json=CHAT | {"context_id": "uneven"})
    assert refused.status_code == 400 and "kvfold compress MODEL" in refused.text


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"context": DOCUMENT, "context_id": "a"}, "in place of a context_id"),
        ({"context": ""}, "context is a text"),
        ({"context": 5}, "context is a text"),
        ({"context": "\ud800"}, "context is a text"),
        ({"context": DOCUMENT, "wrong": 1}, "wrong"),
    ],
    ids=str,
)
def test_wrong_texts_are_refused(arriving, fields, said):
    own = {key: value for key, value in CHAT.items() if key != "context_id"}
    body = json.dumps(own | fields)
    answer = arriving.ask("POST", "/v1/chat/completions", content=body)
    assert answer.status_code == 400 and said in answer.text and not arriving.seen


def test_texts_are_refused_by_a_server_that_compresses_none(contexts):
    vllm = Fake(contexts)
    own = {key: value for key, value in CHAT.items() if key != "context_id"}
    for path, body in (
        ("/v1/chat/completions", own | {"context": DOCUMENT}),
        ("/v1/contexts", {"text": DOCUMENT}),
    ):
        answer = vllm.ask("POST", path, json=body)
        assert answer.status_code == 400 and "start it with --method" in answer.text
    assert not vllm.seen


def test_method_and_budget_of_texts_are_the_servers(arriving):
    for field in ({"method": "kvzip"}, {"budget": 0.5}):
        answer = arriving.ask("POST", "/v1/contexts", json={"text": DOCUMENT} | field)
        assert answer.status_code == 400 and "are the server's" in answer.text


def test_a_vllm_with_pages_of_single_heads_is_told_their_size(tmp_path):
    engine = VllmOptions("m", "n", "bfloat16", tmp_path, None, (), Paged(64))
    command = engine.command(5000)
    assert command[command.index("--block-size") + 1] == "64"
    assert "--block-size" not in VllmOptions("m", "n", "bfloat16", tmp_path, None).command(5000)


def test_vllm_is_started_with_the_connector_and_its_own_arguments(tmp_path):
    engine = VllmOptions(
        "model", "name", "bfloat16", tmp_path, None, ["--tensor-parallel-size", "2"]
    )
    command = engine.command(5000)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    transfer = json.loads(options.pop("--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "kvfold.serve.vllm.connector"
    assert transfer["kv_connector_extra_config"] == {"contexts": str(tmp_path)}
    assert options == {
        "--model": "model",
        "--served-model-name": "name",
        "--dtype": "bfloat16",
        "--host": "127.0.0.1",
        "--port": "5000",
        "--tensor-parallel-size": "2",
    }


class Short(VllmOptions):
    """A child that ends at once."""

    def command(self, port: int) -> list[str]:
        return [super().command(port)[0], "-c", "raise SystemExit(3)"]


def test_a_vllm_that_does_not_start_is_told(tmp_path):
    short = Short("model", "name", "float32", tmp_path, None)
    with pytest.raises(KvfoldError, match="ended with code 3"), started(short):
        pytest.fail("it has started")


def test_what_is_not_installed_is_named(tmp_path: Path):
    options: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "api_key": None, "body": 1}
    with pytest.raises(KvfoldError, match=r"needs vllm: pip install 'kvfold\[vllm\]'"):
        serve("bundled", folder=tmp_path, arguments="", **options)
