# SPDX-License-Identifier: Apache-2.0
"""Padding where it cannot be: to the right, between tokens, or all of a last piece."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.caches import GREEDY
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader


@pytest.fixture
def model():
    return build("llama")


def without(columns: slice | int, length: int = 40) -> torch.Tensor:
    """A mask of two rows, in the second of which `columns` are padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, columns] = 0
    return mask


def contents(cache: CompressedCache) -> list[torch.Tensor]:
    """Copies of all that the layers store."""
    keyed = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [x.clone() for layer in keyed for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "tova", "think:queries=8,recent=8"])
@pytest.mark.parametrize("columns", [slice(-3, None), -1, slice(5, 15)], ids=["3", "1", "hole"])
def test_padding_to_the_right_is_refused_before_anything_is_stored(model, spec, columns):
    budget = 20 if kvfold.parse(spec).takes_budget else None
    cache = CompressedCache(model, spec, budget)
    ids = prompts((40, 40))[0]
    with pytest.raises(KvfoldError, match="pad on the left"):
        Reader(model, cache, without(columns))(ids)
    with pytest.raises(KvfoldError, match="pad on the left"):
        kvfold.generate(model, ids, cache=cache, attention_mask=without(columns), **GREEDY)
    assert cache.get_seq_length() == 0
    reader = Reader(model, cache, without(slice(0, 7)))
    reader(ids)
    before = contents(cache)
    with pytest.raises(KvfoldError, match="pad on the left"):
        reader(continuation(2, 4) * torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert cache.get_seq_length() == 40
    assert all(map(torch.equal, contents(cache), before))


def test_a_prompt_whose_last_piece_is_padding_is_not_answered(model):
    ids, mask = prompts((40, 40))[0], without(slice(-8, None))
    cache = CompressedCache(model, "snapkv:window=8", 20)
    options = {"attention_mask": mask, "prefill_chunk": 8, **GREEDY}
    with pytest.raises(KvfoldError, match="pad on the left"):
        kvfold.generate(model, ids, cache=cache, **options)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "qwen3_5"])
def test_padding_between_tokens_is_refused_where_layers_count_it(name):
    """Windows and states of transformers' own layers would not be those of the row alone."""
    model, ids = build(name), prompts((40, 40))[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    reader = Reader(model, cache, without(slice(0, 7)))
    reader(ids)
    before = contents(cache)
    mask, later = reader.mask, continuation(2, 6)
    with pytest.raises(KvfoldError, match="each row with a cache of its own"):
        reader(later * without(slice(0, 2), 6))
    assert cache.get_seq_length() == 40
    assert all(map(torch.equal, contents(cache), before))
    reader.mask = mask
    assert torch.isfinite(reader(later)).all()


def test_a_turn_that_is_refused_for_its_padding_is_not_read_in_part():
    """The answer's last token, which padding follows, would be read first."""
    model = build("gemma2")
    cache = CompressedCache(model, "snapkv:window=8", 20)
    out = kvfold.generate(model, prompts((40, 40))[0], cache=cache, **GREEDY)
    whole = torch.cat([out, continuation(2, 30)], 1)
    seen, mask = cache.get_seq_length(), without(slice(48, 58), whole.shape[1])
    with pytest.raises(KvfoldError, match="each row with a cache of its own"):
        kvfold.generate(model, whole, cache=cache, attention_mask=mask, **GREEDY)
    assert cache.get_seq_length() == seen == 47
