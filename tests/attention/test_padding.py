# SPDX-License-Identifier: Apache-2.0
"""Padding where it cannot be, and masks of the caller's own that hide more than padding."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.caches import GREEDY
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import MaskedDense, Reader, worst


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "qwen3_5"])
def test_padding_between_tokens_is_refused_where_layers_count_it(name):
    """Windows and states of transformers' own layers would not be those of the row alone."""
    model, ids = build(name), prompts((40, 40))[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    right = without(slice(-8, None))
    with pytest.raises(KvfoldError, match="pad on the left"):
        kvfold.generate(model, ids, cache=cache, attention_mask=right, **GREEDY)
    with pytest.raises(KvfoldError, match="pad on the left"):
        Reader(model, cache, right)(ids)
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


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", ["h2o", "snapkv:window=4", "adakv:window=4"])
@pytest.mark.parametrize("sizes", [(40,), (20, 20), (20, 1, 19)])
def test_rows_that_see_no_entry_change_nothing(dtype, spec, sizes):
    """The second row's first columns are padding: a mask adds to all of its logits."""
    ids, mask = prompts((40, 9))[0], without(slice(0, 31))
    ids = torch.where(mask > 0, ids, 7)
    model = build("llama", dtype)
    batch, row = (CompressedCache(model, spec, 6) for _ in range(2))
    alone = Reader(model, row, torch.ones(1, 9, dtype=torch.long))(ids[1:, 31:])[0, -1]
    reader, start = Reader(model, batch), 0
    with batch.reading():
        for size in sizes:
            reader.mask, reader.started = mask[:, : start + size], False
            logits = reader(ids[:, start : start + size])
            assert torch.isfinite(logits).all()
            start += size
    assert worst(logits[1, -1], alone) <= {torch.float32: 1e-4}.get(dtype, 0.05)
    for layer in range(len(batch.states)):
        heads = zip(batch.positions(layer)[1], row.positions(layer)[0], strict=True)
        assert all(torch.equal(many - 31, single) for many, single in heads)


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


# --- masks of the caller's own -------------------------------------------------------------------

DENSE, UNEVEN = "snapkv:window=8", "adakv:window=8"


def causal(new: int, length: int) -> torch.Tensor:
    """Mask `[1, 1, S, N]` of the last `new` columns."""
    return torch.ones(new, length, dtype=torch.bool).tril(length - new)[None, None]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where `mask` is True, else the lowest number."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def begun(spec: str, budget: int | None = 20) -> tuple[Reader, MaskedDense]:
    """A cache that has read 40 tokens, and the truth."""
    model, twin = (build("llama", torch.float64) for _ in range(2))
    takes = kvfold.parse(spec).takes_budget
    cache = CompressedCache(model, spec, budget if takes else None)
    reader, truth = Reader(model, cache), MaskedDense(twin)
    for each in (reader, truth):
        each(prompts((40,))[0])
    truth.hide(cache)
    return reader, truth


@pytest.mark.parametrize("spec", [DENSE, UNEVEN, "h2o", "kivi:group=8,residual=8"])
def test_several_texts_in_a_row_are_refused(spec):
    """Columns that the last token does not see would be dropped as padding."""
    model, budget = build("llama"), 20 if kvfold.parse(spec).takes_budget else None
    cache = CompressedCache(model, spec, budget)
    texts = causal(40, 40)
    texts[..., 20:, :20] = False
    for mask in (texts, additive(texts, torch.float32)):
        with pytest.raises(KvfoldError, match="several texts"):
            model(prompts((40,))[0], past_key_values=cache, attention_mask=mask)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
@pytest.mark.parametrize("spec", [DENSE, UNEVEN, "h2o"])
def test_a_whole_mask_of_padding_is_that_of_its_columns(model, spec):
    ids, mask = prompts((40, 31))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = []
    for given in (mask, causal(40, 40) & mask.bool()[:, None, None]):
        cache = CompressedCache(model, spec, 20)
        inputs = {"attention_mask": given, "position_ids": places}
        found.append(
            (model(ids, past_key_values=cache, **inputs).logits[:, -1], cache.positions(0))
        )
    torch.testing.assert_close(found[0][0], found[1][0])
    assert all(
        torch.equal(one, other)
        for row, rows in zip(found[0][1], found[1][1], strict=True)
        for one, other in zip(row, rows, strict=True)
    )


@pytest.mark.parametrize("spec", [DENSE, UNEVEN])
def test_a_tree_of_drafts_in_a_frozen_block(spec):
    """Two drafts of three tokens, each of which sees the context and itself."""
    reader, truth = begun(spec)
    tree = causal(6, 46)
    tree[..., 3:, 40:43] = False
    places = torch.tensor([[40, 41, 42, 40, 41, 42]])
    inputs = {"attention_mask": additive(tree, torch.float64), "position_ids": places}
    drafts, later = continuation(1, 6), continuation(1, 4, seed=1)
    with reader.cache.frozen():
        assert worst(reader(drafts, **inputs), truth(drafts, **inputs)) < 1e-9
        reader.cache.crop(-6)
    truth.cache.crop(-6)
    assert worst(reader(later), truth(later)) < 1e-9


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("spec", [DENSE, UNEVEN, "full"])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_tokens_that_were_read_cannot_become_padding(spec, new, frozen):
    reader, _ = begun(spec)
    before, later = contents(reader.cache), continuation(1, new)
    mask = torch.ones(1, 40 + new, dtype=torch.long)
    mask[:, 5:9] = 0
    whole = causal(new, 40 + new) & mask.bool()[:, None, None]
    for given in (mask, whole):
        with pytest.raises(KvfoldError, match=r"row 0, column 5 for padding"):
            if frozen:
                with reader.cache.frozen():
                    reader(later, attention_mask=given)
            else:
                reader(later, attention_mask=given)
    assert reader.cache.get_seq_length() == 40
    assert all(map(torch.equal, contents(reader.cache), before))


@pytest.mark.parametrize("spec", [DENSE, UNEVEN])
def test_older_tokens_hidden_from_some_queries(spec):
    """Attention over uneven heads shows older entries to all."""
    reader, truth = begun(spec)
    mask, later = causal(3, 43), continuation(1, 3)
    mask[..., 0, 5:30] = False
    if spec == UNEVEN:
        with pytest.raises(KvfoldError, match="hides older tokens from some"):
            reader(later, attention_mask=mask)
        assert reader.cache.get_seq_length() == 40
        return
    given = {"attention_mask": additive(mask, torch.float64)}
    assert worst(reader(later, **given), truth(later, **given)) < 1e-9


# --- masks of another width than the text --------------------------------------------------------


def embedded(model, ids):
    return {"inputs_embeds": model.get_input_embeddings()(ids)}


ENTRIES = {
    "ids": lambda model, ids, given: model(input_ids=ids, **given),
    "embeddings": lambda model, ids, given: model(**embedded(model, ids), **given),
    "decoder": lambda model, ids, given: model.get_decoder()(ids, **given),
    "whole": lambda model, ids, given: model(
        ids, **given | {"attention_mask": given["attention_mask"][:, None, None].bool()}
    ),
}


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_5"])
@pytest.mark.parametrize("new", [1, 5])
@torch.no_grad()
def test_a_mask_of_another_width_is_refused_with_the_one_that_is_right(name, new, entry):
    """Of new tokens, of kept and new ones, one too few, and one too many."""
    model, (ids, mask), later = build(name), prompts((40, 31)), continuation(2, new)
    for spec, budget in (("snapkv:window=8", 20), ("adakv:window=8", 20), ("full", None)):
        cache = CompressedCache(model, spec, budget)
        model(ids, attention_mask=mask, past_key_values=cache)
        before = contents(cache)
        for width in (new, 20 + new, 39 + new, 41 + new):
            given = {"attention_mask": torch.ones(2, width), "past_key_values": cache}
            with pytest.raises(KvfoldError, match=f"has {width} columns and needs {40 + new}: 40 "):
                ENTRIES[entry](model, later, given)
        assert all(map(torch.equal, contents(cache), before))
        whole = torch.cat([mask, torch.ones(2, new, dtype=torch.long)], 1)
        model(later, attention_mask=whole, past_key_values=cache)
        assert cache.get_seq_length() == 40 + new


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_first_mask_of_another_width_is_refused_under_both_names_and_when_enabled(model, name):
    ids = prompts((40,))[0]
    for width in (39, 41):
        cache = CompressedCache(model, "snapkv:window=8", 20)
        with pytest.raises(KvfoldError, match=r"needs 40: 0 .* and 40 new"):
            model(ids, attention_mask=torch.ones(1, width), **{name: cache})
        with kvfold.enable(model, "knorm", 0.5), pytest.raises(KvfoldError, match="needs 40"):
            model(ids, attention_mask=torch.ones(1, width), **{name: cache})
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 25),
        torch.ones(3, 25),
        torch.ones(25),
        torch.ones(2, 5, 25),
        torch.ones(2, 1, 4, 25),
        torch.ones(3, 1, 5, 25),
        torch.ones(2, 1, 5, 25, dtype=torch.long),
        torch.ones(2, 25).tolist(),
    ],
    ids=lambda mask: f"{len(mask)}-{getattr(mask, 'ndim', 'list')}-{getattr(mask, 'dtype', '')}",
)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_mask_of_another_shape_is_refused_before_anything_is_read(model, name, mask):
    cache, (ids, _) = CompressedCache(model, "full"), prompts((20, 20))
    model(ids, **{name: cache})
    with pytest.raises(KvfoldError, match=r"attention_mask is a .* \[2, N\]"):
        model(continuation(2, 5), attention_mask=mask, **{name: cache})
    assert cache.get_seq_length() == 20
