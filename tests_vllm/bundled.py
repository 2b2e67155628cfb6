# SPDX-License-Identifier: Apache-2.0
"""Contexts of the bundled model, and what kvfold answers in process."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

import kvfold
from kvfold.eval import short_ruler
from kvfold.hf.chat_template import token_count
from kvfold.methods.stages.select.one_set import Rule
from kvfold.serve.vllm.placeholders import ServedFolder

TOKENS, NEW = 700, 24
# Method and budget; vLLM's pages hold 128 entries where they are not of single heads.
CONTEXTS: dict[str, tuple[str, Any]] = {
    "whole-pages": ("snapkv", 256),
    "broken-page": ("snapkv", 300),
    "same-count": ("knorm", 256),
    "less-than-a-page": ("h2o", 100),
    "moving-sinks": ("streaming_llm", 200),
    "segments": ("kvzip:level=uniform", 0.3),
    "everything": ("full", None),
    "no-bias": ("kvzip:level=uniform + match:bias=none,target=block", 0.3),
}
# Heads that keep different numbers of tokens, levelled: method, budget, rule.
LEVELLED: dict[str, tuple[str, Any, Rule]] = {
    f"{method}-{rule}": (method, 60 if rule == "union" else 200, rule)
    for method in ("kvzip", "adakv", "pyramidkv")
    for rule in get_args(Rule)
}
# Heads that keep different numbers of tokens, in whole pages.
PAGED: dict[str, Any] = {
    **dict.fromkeys(
        (
            "kvzip", "adakv", "pyramidkv", "snapkv", "knorm", "pyramidkv + adakv", "rkv", "keydiff",
            "random", "leverage", "cur", "h2o:decode=append", "compactor", "expected_attention",
            "zap", "roco:decode=append",
        ),
        0.3,
    ),
    "simlayerkv:window=100,recent=100,threshold=0.5": None,
}  # fmt: skip
CODED, UNEVEN, SIXTEEN = "coded", "uneven", "sixteen"
NAMES = (*CONTEXTS, *LEVELLED, CODED)
QUESTIONS = ("What is this text about?", "Which number is it?")


@dataclass(frozen=True)
class Kvfold:
    """The model, a document, its contexts, and three questions."""

    model: Any
    tokenizer: Any
    document: str
    contexts: dict[str, kvfold.Context]
    questions: tuple[str, ...]

    @classmethod
    def with_files_in(cls, folder: Path) -> Kvfold:
        """All contexts, and what vLLM cannot hold: `packed`, `biased`, `uneven`, `sixteen`.

        The last one has pages of 16 entries. `stranger` is of other weights.
        """
        model, tokenizer = kvfold.bundled_model()
        count = partial(token_count, tokenizer)
        sample = short_ruler.generate("single", TOKENS, count, random.Random(1))
        read = partial(kvfold.compress, document=sample.document)
        contexts = {
            name: read(model, tokenizer, method=method, budget=budget)
            for name, (method, budget) in CONTEXTS.items()
        }
        for name, (method, budget, rule) in LEVELLED.items():
            contexts[name] = read(model, tokenizer, method=method, budget=budget).levelled(rule)
        for method, budget in PAGED.items():
            contexts[paged(method)] = read(
                model, tokenizer, method=f"{method} + pages", budget=budget
            )
        for name, context in contexts.items():
            context.save(folder / f"{name}.kvfold")
        contexts[CODED] = _coded(model, tokenizer, contexts["whole-pages"], folder)
        read(model, tokenizer, method="kivi").save(folder / "packed.kvfold")
        biased = read(model, tokenizer, method="snapkv + match", budget=200)
        biased.save(folder / "biased.kvfold")
        contexts[UNEVEN] = read(model, tokenizer, method="pyramidkv", budget=200)
        contexts[UNEVEN].save(folder / f"{UNEVEN}.kvfold")
        contexts[SIXTEEN] = read(model, tokenizer, method="kvzip + pages:size=16", budget=0.3)
        contexts[SIXTEEN].save(folder / f"{SIXTEEN}.kvfold")
        other, _ = kvfold.bundled_model()
        with torch.no_grad():
            other.model.norm.weight.mul_(1.01)
        read(other, tokenizer, method="snapkv", budget=256).save(folder / "stranger.kvfold")
        return cls(
            model, tokenizer, sample.document, contexts, (sample.questions[0].text, *QUESTIONS)
        )

    def question(self, name: str, question: str) -> list[int]:
        """The tokens that a chat reads after the document."""
        tokens: list[int] = (
            self.contexts[name].chat().question_ids(question, "", special_tokens=False)[0].tolist()
        )
        return tokens

    def answer(self, name: str, question: str, new: int = NEW) -> list[int]:
        """Greedy tokens, whatever they are."""
        chat = self.contexts[name].chat()
        asked = torch.cat([chat.ids, chat.question_ids(question, "", special_tokens=False)], 1)
        return self.greedy(asked, new, chat.reader)

    def greedy(self, ids: torch.Tensor, new: int = NEW, cache: Any = None) -> list[int]:
        """So many tokens after `ids [1, N]`."""
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
        )
        tokens: list[int] = out[0, ids.shape[1] :].tolist()
        return tokens


def paged(method: str) -> str:
    """The id of a context of a method in pages."""
    return "-".join(["pages", *re.findall(r"\w+", method)])


def _coded(model: Any, tokenizer: Any, context: kvfold.Context, folder: Path) -> kvfold.Context:
    """The context of a file whose entries are coded in a basis of this model."""
    count = partial(token_count, tokenizer)
    texts = [
        short_ruler.generate("single", 400, count, random.Random(seed)).document
        for seed in range(5, 9)
    ]
    kvfold.fit_codec(model, tokenizer, texts, folder / "basis.safetensors")
    path = folder / f"{CODED}.kvfold"
    context.save(path, codec=f"kvtc:file={folder / 'basis.safetensors'},ratio=4")
    return kvfold.load(path, model, tokenizer)


def asked(served_folder: ServedFolder, made: Kvfold, name: str, question: str) -> Any:
    """The request for a question."""
    from kvfold.serve.vllm.request import ContextPrompt

    return ContextPrompt(served_folder.get(name), made.question(name, question))
