# SPDX-License-Identifier: Apache-2.0
"""recent: the last tokens stay in every head, and another method's best beside them."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import BudgetError, CompressedCache, IllegalComposition, KvfoldError
from tests.helpers.caches import PADDED, positions, start
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer

KNORM = "knorm:skip_layers=none"
SIZE, LAST = 20, 5


@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
def test_the_last_tokens_and_the_best_of_the_others_stay(lengths):
    model = build("llama", torch.float64)
    kept = positions(start(model, f"{KNORM} + recent:tokens={LAST}", lengths, budget=SIZE).cache)
    ids, _ = prompts(lengths)
    with torch.no_grad():
        for row, length in enumerate(lengths):
            text = ids[row : row + 1, -length:]
            full = model(text, use_cache=True).past_key_values
            for layer, of_layer in zip(full.layers, kept, strict=True):
                for norms, head in zip(layer.keys[0].norm(dim=-1), of_layer[row], strict=True):
                    old = norms[: length - LAST].argsort(stable=True)[: SIZE - LAST]
                    expected = [*old.sort().values.tolist(), *range(length - LAST, length)]
                    expected = expected if length > SIZE else list(range(length))
                    assert [column - (max(lengths) - length) for column in head] == expected


def test_heads_of_a_pool_keep_them_too():
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip + recent:tokens=7", 20)
    length = context.ids.shape[1]
    for layer in positions(context.cache):
        for head in layer[0]:
            assert head[-7:] == list(range(length - 7, length))
    plain = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip", 20)
    assert positions(plain.cache) != positions(context.cache)
    assert plain.stats().mean_kept == context.stats().mean_kept


def test_rounds_keep_the_newest_tokens_of_an_answer():
    reader = start(build("llama"), f"{KNORM} + recent:tokens={LAST} + every:interval=4")
    for token in torch.arange(3, 15).view(-1, 1, 1):
        reader(token)
    for layer in positions(reader.cache):
        assert all(head[-LAST:] == list(range(76 - LAST, 76)) for head in layer[0])


def test_what_it_cannot_join_is_refused():
    with pytest.raises(IllegalComposition, match="compose it with a method that does"):
        kvfold.parse("recent").stages()
    with pytest.raises(IllegalComposition, match="both bring the forced stage"):
        kvfold.parse("zap + recent").stages()
    with pytest.raises(KvfoldError, match="recent:tokens is 1 or more, not 0"):
        kvfold.parse("knorm + recent:tokens=0")
    with pytest.raises(BudgetError, match="at least 30"):
        CompressedCache(build("llama"), f"{KNORM} + recent:tokens=30", 20)
