# SPDX-License-Identifier: Apache-2.0
"""Questions to a context, a chat template, and the tensors that caches hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvfold
from kvfold.cache.fork import fork
from tests.helpers.contexts import DOCUMENT, KINDS, state
from tests.helpers.tokenizers import WORDS, word_tokenizer

QUESTIONS = [" ".join(WORDS[(i * j) % 9] for j in range(1, 3 + i % 4)) for i in range(12)]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def chat_tokenizer() -> Any:
    """The tokenizer of words with `TEMPLATE`, in which roles have no brackets."""
    made = word_tokenizer()
    made.chat_template = TEMPLATE.replace("<' + m['role'] + '>", "' + m['role'] + '")
    return made


def held(context: kvfold.Context) -> list[dict[str, Any]]:
    """Copies of everything that the context's layers hold."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in state(layer).items()}
        for layer in context.cache.states
    ]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
        for a, b in zip(one, other, strict=True)
        for name in a
    )


def storages(held: Any, found: dict[int, int], seen: set[int]) -> dict[int, int]:
    """Bytes of every storage that is reachable, by address."""
    if id(held) in seen:
        return found
    seen.add(id(held))
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(held, dict):
        for value in held.values():
            storages(value, found, seen)
    elif isinstance(held, list | tuple | set):
        for value in held:
            storages(value, found, seen)
    elif type(held).__module__.startswith("kvfold") or hasattr(held, "record_past"):
        storages(vars(held), found, seen)
    return found


def compressed(model: Any, tokenizer: Any, spec: str, text: str = DOCUMENT) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, text, spec, KINDS[spec][0])


def expected(context: kvfold.Context, text: str, count: int) -> str:
    """The greedy answer to a whole conversation that is read at once."""
    reader, tokenizer = fork(context.cache), context.tokenizer
    new = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    ids = torch.cat([context.ids, new], 1)
    out = context.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=reader,
        max_new_tokens=count,
        do_sample=False,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()
