# SPDX-License-Identifier: Apache-2.0
"""`peak` in later turns and files; its rule is its observation's test."""

from __future__ import annotations

import kvfold
from tests.helpers.budgets import SMALL
from tests.helpers.caches import kept, start
from tests.helpers.contexts import new_model
from tests.helpers.models import build, continuation
from tests.helpers.tokenizers import word_tokenizer


def test_later_turns_evict_by_the_numbers_of_all_prompts() -> None:
    reader = start(build("llama"), "peak", budget=SMALL)
    assert set(kept(reader.cache)) == {SMALL}
    reader(continuation(1, 9))
    assert set(kept(reader.cache)) == {SMALL}


def test_numbers_are_saved_with_a_context(tmp_path) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, "sky sea " * 20, "peak", SMALL)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    for mine, other in zip(context.cache.states, loaded.cache.states, strict=True):
        (name, (numbers, _)), *_ = mine.observers.numbers().items()
        assert name == "peak_logits" and (numbers == other.observers.numbers()[name][0]).all()
