# SPDX-License-Identifier: Apache-2.0
"""Answers of a really trained model: from KVzip, a chat, a context file, a server, and vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold.eval import short_ruler
from kvfold.eval.tasks.ruler_niah import split
from kvfold.hf.chat_template import token_count
from tests.helpers.serving import running

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
QUESTIONS = ("What is this text about?", "Name one word that it uses often.")
BUDGET, NEW = 0.3, 24


def needle_documents(tokenizer: Any, text: str, count: int = 4) -> list[short_ruler.NeedleDocument]:
    """One needle each, in 500 tokens of the text."""
    sentences = split(" ".join(text.split()))
    count_tokens = partial(token_count, tokenizer)
    return [
        short_ruler.generate("single", 500, count_tokens, random.Random(seed), haystack=sentences)
        for seed in range(count)
    ]


def right(model: Any, tokenizer: Any, documents: list[Any], spec: str, budget: Any) -> list[bool]:
    """Which documents' questions are answered, asked after the document was compressed."""
    found = []
    for document in documents:
        context = kvfold.compress(model, tokenizer, document.document, spec, budget)
        (question,) = document.questions
        answer = context.ask(question.text, answer_prefix=question.prefix, max_new_tokens=NEW)
        found.append(question.score(answer) == 1)
    return found


def test_needles_are_found_before_the_question_is_known(model, tokenizer, text, slides):
    """By KVzip; by recall where few heads see the whole text, so that the copying one needs all."""
    documents = needle_documents(tokenizer, text)
    answered = partial(right, model, tokenizer, documents)
    full = answered("full", None)
    assert all(full) or (slides and sum(full) > len(full) / 2)
    if slides:
        assert answered("recall", None) == full
    else:
        assert all(answered("kvzip", BUDGET))
    assert sum(answered("random", BUDGET)) < sum(full) / 2


def prompt_of(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Messages in the chat template, or as paragraphs, up to where the answer begins."""
    if tokenizer.chat_template:
        shown = {"tokenize": False, "add_generation_prompt": True}
        return str(tokenizer.apply_chat_template(messages, **shown))
    after = {"user": "\n", "assistant": "\n\n"}
    said = "".join(message["content"] + after[message["role"]] for message in messages)
    return f"{tokenizer.bos_token}{said}"


def test_two_turns_are_the_chat_template_s_or_paragraphs(model, tokenizer, text):
    """Greedy answers of transformers alone; what it generated stays the tokens that it was."""
    document = text[:1500]
    chat = kvfold.compress(model, tokenizer, document, "full").chat()
    messages: list[dict[str, str]] = []
    read, written = torch.zeros(1, 0, dtype=torch.long), ""
    for question in QUESTIONS:
        opening = "" if messages else f"{document}\n\n"
        messages.append({"role": "user", "content": opening + question})
        whole = prompt_of(tokenizer, messages)
        assert whole.startswith(written)
        new = tokenizer(whole[len(written) :], add_special_tokens=False, return_tensors="pt")
        prompt = torch.cat([read, new.input_ids], 1)
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
        tokens = [t for t in made[0, prompt.shape[1] :].tolist() if t != tokenizer.eos_token_id]
        answer = tokenizer.decode(tokens)
        assert chat.ask(question, max_new_tokens=NEW) == answer.strip() != ""
        messages.append({"role": "assistant", "content": answer})
        read = torch.cat([prompt, torch.tensor([tokens])], 1)
        written = whole + answer


def test_a_context_file_and_a_server_answer_alike(model, tokenizer, text, tmp_path):
    document = text[:2000]
    context = kvfold.compress(model, tokenizer, document, "kvzip", BUDGET)
    chat = context.chat()
    expected = [chat.ask(question, max_new_tokens=NEW) for question in QUESTIONS]
    assert all(expected)
    context.save(tmp_path / "text.kvfold")
    loaded = kvfold.load(tmp_path / "text.kvfold", model, tokenizer).chat()
    assert [loaded.ask(question, max_new_tokens=NEW) for question in QUESTIONS] == expected
    with running(model, tokenizer, method="kvzip", budget=BUDGET) as server:
        name = server.create(document)
        messages: list[dict[str, str]] = []
        for question, answer in zip(QUESTIONS, expected, strict=True):
            messages.append({"role": "user", "content": question})
            given = {"messages": messages, "context_id": name, "max_tokens": NEW}
            assert server.says(question, **given) == answer
            messages.append({"role": "assistant", "content": answer})


def greedy(context: kvfold.Context, question: list[int]) -> list[int]:
    """The tokens that answer a question's tokens, whatever they are."""
    chat = context.chat()
    ids = torch.cat([chat.ids, torch.tensor([question])], 1)
    out = context.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=chat.reader,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM has an environment of its own")
def test_vllm_answers_alike(model, tokenizer, folder, text, tmp_path):
    expected: dict[str, list[list[int]]] = {}
    asked: dict[str, list[list[int]]] = {}
    specs = {"snapkv": "snapkv", "even": "kvzip:level=uniform", "kvzip": "kvzip + pages"}
    for name, spec in specs.items():
        context = kvfold.compress(model, tokenizer, text[:2000], spec, BUDGET)
        context.save(tmp_path / f"{name}.kvfold")
        chat = context.chat()
        asked[name] = [
            chat.question_ids(question, "", special_tokens=False)[0].tolist()
            for question in QUESTIONS
        ]
        expected[name] = [greedy(context, question) for question in asked[name]]
    (tmp_path / "asked.json").write_text(json.dumps({"new": NEW, "questions": asked}))
    command = [str(VLLM), "-m", "tests_real.answers_of_vllm", folder, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads((tmp_path / "answers.json").read_text()) == expected
