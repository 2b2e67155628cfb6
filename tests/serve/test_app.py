# SPDX-License-Identifier: Apache-2.0
"""The endpoint answers as the library does, and as OpenAI's clients expect."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvfold
from kvfold.serve.decoding import StrippedText
from tests.helpers.chats import QUESTIONS, TEMPLATE
from tests.helpers.contexts import DOCUMENT, KINDS, KIVI, QUESTION, new_model
from tests.helpers.serving import NAME, Running, running, until
from tests.helpers.tokenizers import SPECIAL, WORDS, word_tokenizer

OTHER = " ".join(reversed(DOCUMENT.split()))


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = word_tokenizer()
    made.chat_template = TEMPLATE.replace("<' + m['role'] + '>", "' + m['role'] + '")
    return made


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Any:
    with running(model, tokenizer, workers=2) as made:
        yield made


@pytest.fixture
def context(server: Running) -> Any:
    name = server.create(DOCUMENT)
    yield name
    server.http.delete(f"/v1/contexts/{name}")


@pytest.fixture(scope="module")
def alone(model: Any, tokenizer: Any) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, "streaming_llm", "kvzip", "full"])
def test_an_answer_is_the_one_of_the_library(server, model, tokenizer, spec):
    budget = KINDS[spec][0]
    name = server.create(DOCUMENT, method=spec, budget=budget)
    lone = kvfold.compress(model, tokenizer, DOCUMENT, spec, budget)
    answers = [server.says(q, context_id=name) for q in QUESTIONS[:4]]
    assert answers == [lone.ask(q, max_new_tokens=8) for q in QUESTIONS[:4]]
    assert len(set(answers)) > 1
    server.http.delete(f"/v1/contexts/{name}")


def test_turns_are_read_as_a_chat_does(server, context, alone):
    chat = alone.chat()
    first = chat.ask(QUESTIONS[1], max_new_tokens=5)
    second = chat.ask(QUESTIONS[2], max_new_tokens=5)
    messages = [
        {"role": "user", "content": QUESTIONS[1]},
        {"role": "assistant", "content": [{"type": "text", "text": first}]},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    options = {"messages": messages, "context_id": context, "max_tokens": 5}
    assert server.says("", **options) == second


def test_without_a_context_it_is_the_model_s_own_answer(server, model, tokenizer):
    messages = [
        {"role": "system", "content": "we go here"},
        {"role": "user", "content": QUESTION},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert server.says("", messages=messages) == expected
    for prompt in (text, ids[0].tolist(), [text], [ids[0].tolist()]):
        made = server.openai.completions.create(
            model=NAME, prompt=prompt, max_tokens=8, temperature=0
        )
        assert made.choices[0].text == expected and made.usage.prompt_tokens == ids.shape[1]
    assert server.openai.completions.create(model=NAME, prompt=text).usage.completion_tokens == 16


def test_a_completion_goes_on_after_a_context(server, context, alone, tokenizer):
    made = server.openai.completions.create(
        model=NAME,
        prompt=f"\n\n{QUESTION}{alone.frame.after}",
        max_tokens=8,
        temperature=0,
        extra_body={"context_id": context},
    )
    assert made.choices[0].text.strip() == alone.ask(QUESTION, max_new_tokens=8)
    assert made.usage.prompt_tokens_details.cached_tokens == alone.ids.shape[1]


def test_answers_end_at_their_length_at_a_stop_string_or_by_themselves(
    server, context, alone, model, tokenizer
):
    free = alone.ask(QUESTION, max_new_tokens=8).split()

    def ended(**options: Any) -> tuple[str, str, int]:
        body = server.chat(QUESTION, context_id=context, **options).json()
        choice = body["choices"][0]
        return (
            choice["message"]["content"],
            choice["finish_reason"],
            body["usage"]["completion_tokens"],
        )

    assert ended() == (" ".join(free), "length", 8)
    assert ended(max_tokens=None, max_completion_tokens=3) == (" ".join(free[:3]), "length", 3)
    assert ended(stop=free[2])[:2] == alone_until(free, free[2])
    assert ended(stop=["nothing", f"{free[2]} {free[3]}"])[1] == "stop"
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(free[4])]
    try:
        text, reason, tokens = ended()
        assert (reason, tokens) == ("stop", free.index(free[4]) + 1)
        assert text == " ".join(free[:tokens])
    finally:
        model.generation_config.eos_token_id = None


def alone_until(words: list[str], stop: str) -> tuple[str, str]:
    return " ".join(words).partition(stop)[0].strip(), "stop"


def test_white_space_is_left_out_at_both_ends_only():
    for pieces in (["  a ", " ", " b\n", "\n"], [" ", "\n"], ["a"], [" a b "], ["", "a", " ", ""]):
        strip = StrippedText()
        assert "".join(map(strip.of, pieces)) == "".join(pieces).strip()


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_seed_fixes_an_answer_whatever_else_is_answered(server, context, alone):
    def drawn(seed: int | None, temperature: float = 2.0, **options: Any) -> str:
        asked = {"context_id": context, "temperature": temperature, "seed": seed}
        return server.says(QUESTION, **asked, **options)

    lone = {seed: drawn(seed) for seed in range(3)}
    assert len(set(lone.values())) > 1
    with ThreadPoolExecutor(6) as pool:
        seeds = [0, None, 1, None, 2] * 4
        for seed, text in zip(seeds, pool.map(drawn, seeds), strict=True):
            assert seed is None or text == lone[seed]
    greedy = alone.ask(QUESTION, max_new_tokens=8)
    assert drawn(0, top_p=1e-6) == greedy == drawn(1, temperature=1e-3)


def test_tokens_are_drawn_by_their_probability():
    from kvfold.serve.sampling import TokenSampler

    draw = TokenSampler(torch.Generator().manual_seed(0))
    share = torch.tensor([0.1, 0.6, 0.3])
    drawn = torch.cat([draw(None, share.log()[None]).argmax(-1) for _ in range(4000)])
    found = drawn.bincount(minlength=3) / len(drawn)
    assert torch.allclose(found, share, atol=0.03)


# --- streams -------------------------------------------------------------------------------------


def test_the_openai_client_streams(server, context, alone):
    options: Any = {
        "model": NAME,
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        "extra_body": {"context_id": context},
    }
    chunks = list(
        server.openai.chat.completions.create(
            messages=[{"role": "user", "content": QUESTION}],
            stream_options={"include_usage": True},
            **options,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == alone.ask(QUESTION, max_new_tokens=8)
    assert len(chunks) > 6 and len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == alone.ids.shape[1]
    pieces = list(server.openai.completions.create(prompt=QUESTION, **options))
    whole = server.openai.completions.create(prompt=QUESTION, **options | {"stream": False})
    assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "length"


def test_a_stream_is_server_sent_events(server, context):
    answered = server.chat(QUESTION, context_id=context, stream=True)
    assert answered.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answered.text.split("\n\n")
    assert done == "data: [DONE]" and end == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_a_failure_in_mid_stream_is_told(server, context, monkeypatch):
    whole = server.engine.answer

    def fails_at_the_end(request: Any, put: Any, cancelled: Any) -> None:
        whole(request, put, cancelled)
        raise RuntimeError("secret")

    monkeypatch.setattr(server.engine, "answer", fails_at_the_end)
    text = server.chat(QUESTION, context_id=context, stream=True).text
    assert "server_error" in text.split("\n\n")[-2] and "secret" not in text
    assert "[DONE]" not in text
    answered = server.chat(QUESTION, context_id=context)
    assert answered.status_code == 500 and "secret" not in answered.text
    assert answered.json()["error"]["type"] == "server_error"
    # The same connection goes on.
    stream = answered.extensions["network_stream"]
    assert server.http.get("/health").extensions["network_stream"] is stream

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(server.engine, "answer", out_of_memory)
    answered = server.chat(QUESTION, context_id=context)
    assert answered.status_code == 503 and answered.headers["retry-after"]


# --- prefixes ------------------------------------------------------------------------------------


def cached(answered: Any) -> int:
    return int(answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_request_that_begins_with_a_context_uses_it(server, context, alone, tokenizer):
    hits = server.metric('kvfold_prefix_cache_total{result="hit"}')
    misses = server.metric('kvfold_prefix_cache_total{result="miss"}')
    answered = server.chat(f"{DOCUMENT}\n\n{QUESTION}")
    assert cached(answered) == alone.ids.shape[1]
    expected = alone.ask(QUESTION, max_new_tokens=8)
    assert answered.json()["choices"][0]["message"]["content"] == expected
    assert cached(server.chat(f"{OTHER}\n\n{QUESTION}")) == 0
    without = server.chat(f"{DOCUMENT}\n\n{QUESTION}", prefix_cache=False)
    assert cached(without) == 0
    assert without.json()["choices"][0]["message"]["content"] != expected
    assert server.metric('kvfold_prefix_cache_total{result="hit"}') == hits + 1
    assert server.metric('kvfold_prefix_cache_total{result="miss"}') == misses + 1
    text = f"{alone.frame.before}{DOCUMENT} {QUESTION}"
    body = {"model": NAME, "prompt": tokenizer(text, add_special_tokens=False).input_ids}
    assert cached(server.http.post("/v1/completions", json=body)) == alone.ids.shape[1]


@pytest.mark.slow
def test_the_longest_and_newest_context_is_used(server, context):
    longer = server.create(f"{DOCUMENT} {DOCUMENT}")
    twin = server.create(f"{DOCUMENT} {DOCUMENT}", budget=60)
    tokens = len(server.engine.tokenizer(DOCUMENT).input_ids)
    prompt = f"{DOCUMENT} {DOCUMENT} {QUESTION}"
    assert cached(server.chat(prompt)) > 2 * tokens - 1
    for name in (twin, longer):
        named = server.says(QUESTION, context_id=name)
        assert server.says(prompt) == named
        server.http.delete(f"/v1/contexts/{name}")
    assert tokens <= cached(server.chat(prompt)) < 2 * tokens


def test_a_blank_line_that_joins_the_last_token_does_not_matter(model):
    joined = f"{WORDS[0]}\n\n"
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS[:-1], joined])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+(\n\n)?|<\w+>"), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )
    text = f"{DOCUMENT} {WORDS[0]}"
    lone = kvfold.compress(model, tokenizer, text, "snapkv", 40)
    ids = tokenizer(f"{text}\n\n{QUESTION}", add_special_tokens=False).input_ids
    assert ids[lone.ids.shape[1] - 2] == vocabulary[joined]
    with running(model, tokenizer) as server:
        server.create(text)
        answered = server.chat(f"{text}\n\n{QUESTION}")
        assert cached(answered) == lone.ids.shape[1]
        said = answered.json()["choices"][0]["message"]["content"]
        assert said == lone.ask(QUESTION, max_new_tokens=8)
        assert cached(server.chat(f"{text}{QUESTION}")) == 0


def test_a_question_longer_than_a_piece_is_read_in_pieces(model, tokenizer, alone):
    with running(model, tokenizer, prefill_chunk=16) as server:
        name = server.create(DOCUMENT, method="full")
        lone = kvfold.compress(model, tokenizer, DOCUMENT, "full")
        question = " ".join(QUESTIONS)
        assert len(question.split()) > 32
        assert server.says(question, context_id=name) == lone.ask(question, max_new_tokens=8)


# --- contexts ------------------------------------------------------------------------------------


def test_contexts_come_and_go(server, alone):
    before = server.engine.contexts.nbytes
    made = server.http.post("/v1/contexts", json={"text": DOCUMENT, "id": "mine", "budget": "50%"})
    stats = kvfold.compress(alone.model, alone.tokenizer, DOCUMENT, "snapkv", 0.5).stats()
    told = made.json()
    assert told["id"] == "mine" and told["tokens"] == stats.seen
    assert told["kept"] == stats.kept_fraction and told["bytes_full"] == stats.nbytes_full
    assert told["kept_per_layer"] == [rows[0] for rows in stats.kept]
    assert told["bytes"] == stats.nbytes + stats.id_bytes + alone.ids.nbytes
    assert server.engine.contexts.nbytes == before + told["bytes"]
    assert server.http.get("/v1/contexts/mine").json() == told
    listed = server.http.get("/v1/contexts").json()["data"]
    assert [one["id"] for one in listed] == ["mine"]
    again = server.http.post("/v1/contexts", json={"text": DOCUMENT, "id": "mine"})
    assert again.status_code == 409
    assert server.http.delete("/v1/contexts/mine").json()["deleted"]
    assert server.http.delete("/v1/contexts/mine").status_code == 404
    assert server.engine.contexts.nbytes == before


def test_a_file_is_uploaded(server, alone):
    data = {"method": "snapkv", "budget": "40", "id": "file"}
    file = {"file": ("a.txt", DOCUMENT.encode())}
    made = server.http.post("/v1/contexts", files=file, data=data)
    assert made.status_code == 201, made.text
    assert server.says(QUESTION, context_id="file") == alone.ask(QUESTION, max_new_tokens=8)
    server.http.delete("/v1/contexts/file")
    for wrong, status in (
        ({"files": {"file": ("a.txt", b"\xff\xfe")}}, 400),
        ({"files": {"other": ("a.txt", b"a")}}, 400),
        ({"files": {"file": ("a.txt", b"")}}, 400),
        ({"files": file, "data": {"id": "../a"}}, 400),
        ({"files": file, "data": {"more": "a"}}, 400),
        ({"files": file, "data": {"budget": "much"}}, 400),
        ({"content": DOCUMENT.encode(), "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, 400),
    ):
        refused = server.http.post("/v1/contexts", **wrong)
        assert refused.status_code == status, (wrong, refused.text)
        assert refused.json()["error"]["message"]


@pytest.mark.slow
def test_what_is_counted(server, context):
    prompt = server.metric('kvfold_tokens_total{kind="prompt"}')
    generated = server.metric('kvfold_tokens_total{kind="generated"}')
    usage = server.chat(QUESTION, context_id=context).json()["usage"]
    assert server.metric('kvfold_tokens_total{kind="prompt"}') == prompt + usage["prompt_tokens"]
    assert server.metric('kvfold_tokens_total{kind="generated"}') == generated + 8
    held = server.engine.contexts.get(context)
    assert server.metric('kvfold_contexts{place="memory"}') == 1
    assert server.metric("kvfold_context_bytes") == held.size
    assert server.metric("kvfold_context_tokens") == held.stats.seen
    assert server.metric("kvfold_context_tokens_kept") == pytest.approx(40)
    assert server.metric("kvfold_queue_depth") == 0
    until(lambda: server.metric("kvfold_running") == 0)
    route = 'kvfold_requests_total{route="/v1/chat/completions",status="200"}'
    before = server.metric(route)
    server.chat(QUESTION, context_id=context)
    assert server.metric(route) == before + 1


def test_models(server):
    assert [model.id for model in server.openai.models.list()] == [NAME]
    assert server.openai.models.retrieve(NAME).id == NAME
    assert server.http.get("/v1/models/other/model").status_code == 404
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
