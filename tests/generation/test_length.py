# SPDX-License-Identifier: Apache-2.0
"""Texts longer than those a model was trained on are refused, unless a user says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.hf.models import trained_length
from tests.helpers.commands import kvfold_command, refused
from tests.helpers.models import build, prompts
from tests.helpers.serving import running
from tests.helpers.tokenizers import WORDS, tiny_llama, word_tokenizer

TRAINED = 64
BOTH_NUMBERS = r"\b{}\b.*\b64\b"


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", max_position_embeddings=TRAINED)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def words(count: int) -> str:
    return " ".join(WORDS[i % len(WORDS)] for i in range(count))


@pytest.mark.parametrize(
    ("family", "rope", "longest"),
    [
        ("llama", {}, 64),
        ("llama", {"rope_type": "linear", "factor": 2.0}, 128),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 256),
        (
            "llama",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        (
            # Names what is reached, as DeepSeek-V3 and gpt-oss do.
            "llama",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            64,
        ),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            64,
        ),
        ("gemma3", {}, 64),
    ],
)
def test_the_length_is_what_scaling_reaches(family, rope, longest):
    changes: dict[str, Any] = {"max_position_embeddings": TRAINED}
    if rope:
        changes["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    assert trained_length(build(family, **changes)) == longest


@pytest.mark.parametrize("method", ["snapkv", "h2o", "full", "streaming_llm"])
def test_prompts_are_refused_with_both_numbers(model, method):
    ids, _ = prompts((TRAINED + 6,))

    def read(count: int, **options: Any) -> Any:
        budget = None if method == "full" else 40
        cache = kvfold.CompressedCache(model, method, budget)
        return kvfold.generate(model, ids[:, :count], cache=cache, max_new_tokens=2, **options)

    with pytest.raises(KvfoldError, match=BOTH_NUMBERS.format(TRAINED + 6)):
        read(TRAINED + 6)
    assert read(TRAINED + 6, allow_longer=True).shape[1] == TRAINED + 8
    assert read(TRAINED).shape[1] == TRAINED + 2


def test_padding_is_not_counted(model):
    ids, mask = prompts((TRAINED, 20))
    ids, mask = (torch.nn.functional.pad(x, (6, 0)) for x in (ids, mask))
    cache = kvfold.CompressedCache(model, "snapkv", 40)
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, max_new_tokens=1)


def test_sinks_that_follow_bound_how_far_attention_reaches(model):
    ids, _ = prompts((4 * TRAINED,))

    def read(method: str, piece: int) -> Any:
        cache = kvfold.CompressedCache(model, method, 20)
        options = {"compress": "per_chunk", "prefill_chunk": piece, "max_new_tokens": 2}
        return kvfold.generate(model, ids, cache=cache, **options)

    read("streaming_llm", 30)
    with pytest.raises(KvfoldError, match=BOTH_NUMBERS.format(80)):
        read("streaming_llm", 60)
    with pytest.raises(KvfoldError, match=BOTH_NUMBERS.format(4 * TRAINED)):
        read("streaming_llm_original", 30)


def test_learned_positions_end_where_they_end():
    model = build("gpt2", n_positions=TRAINED)
    ids, _ = prompts((TRAINED + 1,))
    cache = kvfold.CompressedCache(model, "snapkv", 40)
    with pytest.raises(KvfoldError, match="learned positions"):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=1, allow_longer=True)


def test_documents_and_conversations_are_refused_with_both_numbers(model, tokenizer):
    with pytest.raises(KvfoldError, match=BOTH_NUMBERS.format("71")):
        kvfold.compress(model, tokenizer, words(70), "snapkv", 40)
    context = kvfold.compress(model, tokenizer, words(50), "snapkv", 40)
    chat = context.chat()
    for ask in (context.ask, chat.ask, lambda q, **o: list(chat.stream(q, **o))):
        with pytest.raises(KvfoldError, match=BOTH_NUMBERS.format("71")):
            ask(words(20), max_new_tokens=2)
    context.ask(words(20), max_new_tokens=2, allow_longer=True)
    chat.ask(words(5), max_new_tokens=4)
    chat.add(words(2), words(2))
    with pytest.raises(KvfoldError, match=r"and LlamaForCausalLM reads at most 64"):
        chat.ask(words(4), max_new_tokens=2)
    longer = kvfold.compress(model, tokenizer, words(70), "snapkv", 40, allow_longer=True)
    longer.ask(words(5), max_new_tokens=2)


def test_the_server_refuses_too_long_texts_unless_it_is_told_otherwise(model, tokenizer):
    with running(model, tokenizer) as server:
        answer = server.http.post("/v1/contexts", json={"text": words(70)})
        assert answer.status_code == 400
        assert "71" in answer.text and "64" in answer.text
        name = server.create(words(50))
        answer = server.chat(words(20), context_id=name)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    with running(model, tokenizer, allow_longer=True) as server:
        name = server.create(words(70))
        assert server.chat(words(20), context_id=name).status_code == 200


def test_commands_refuse_too_long_texts_unless_they_are_told_otherwise(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    text, file = tmp_path / "text.txt", tmp_path / "text.kvfold"
    text.write_text(words(520))
    model, limits = str(tmp_path / "model"), ("--method", "knorm", "--budget", "20")
    read = ("--max-new-tokens", "1")
    commands = [
        ("run", model, "--file", str(text), *limits, *read),
        ("compress", model, str(text), *limits),
        ("inspect", "--model", model, "--file", str(text), "--out", str(tmp_path / "page")),
    ]
    for command in commands:
        message = refused(*command)
        assert re.search(r"\b52\d\b.*\b512\b.*--allow-longer", message), message
    for command in commands[:2]:
        assert kvfold_command(*command, "--allow-longer").exit_code == 0
    assert kvfold_command("ask", model, str(file), "sky", *read).exit_code == 0
