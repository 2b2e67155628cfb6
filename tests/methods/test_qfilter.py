# SPDX-License-Identifier: Apache-2.0
"""qfilter: the golden direction, kept sets by hand in float64, and files of others refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, ScorerFileError
from kvfold.fitted.fitting.filters import QuerySums
from kvfold.fitted.of_model import write_fitted
from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.filters import Filters, LayerFilters
from tests.helpers.caches import BATCHES, PADDED, decode, positions, start
from tests.helpers.contexts import new_model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.scorers import zap_of
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

SIZE = 20
TOKENS, FEATURES = torch.arange(8)[:, None], torch.arange(4)
KEYS = ((7 * TOKENS + 3 * FEATURES + TOKENS * FEATURES) % 11 - 5) / 4
QUERIES = ((4 * TOKENS + 5 * FEATURES + 2 * TOKENS * FEATURES) % 9 - 4) / 4
GOLDEN = torch.tensor([0.543644, 0.363212, 0.710780, -0.259460])


def model_of(group: int, **changes: Any) -> Any:
    heads = {1: (4, 4), 3: (6, 2), 8: (8, 1)}[group]
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 96}
    return build("llama", torch.float64, **sizes, **changes)


def random_filters(model: Any) -> Tensor:
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    shape = config.num_hidden_layers, config.num_key_value_heads, size
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def qfilter_of(model: Any, folder: Path, options: str = "") -> str:
    """The text of qfilter with random filters of the model, written into `folder`."""
    path = folder / "filters.safetensors"
    filters = Filters(random_filters(model))
    write_fitted(path, filters, model, written_by="", target="qfilter", texts=0)
    return f"qfilter:file={path}{options}"


@torch.no_grad()
def products(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """⟨k, u⟩ `[L, B, H, N]`, float64, −∞ at padding, from the model's own full cache."""
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = model(ids, attention_mask=mask, position_ids=at, use_cache=True).past_key_values
    keys = torch.stack([layer.keys.double() for layer in cache.layers])
    scores = torch.einsum("lbhtd,lhd->lbht", keys, random_filters(model).double())
    return scores.masked_fill(mask[None, :, None] == 0, -torch.inf)


def best(scores: Tensor, size: int) -> list[Any]:
    return scores.topk(size).indices.sort().values.tolist()


# --- the filter ----------------------------------------------------------------------------------


def test_the_golden_direction_and_its_products():
    filters = QuerySums.of([QUERIES[None]]).filters(1)
    torch.testing.assert_close(filters[0, 0].float(), GOLDEN, atol=2e-6, rtol=0)
    keys = KEYS[None, None]
    observation = Observation(keys, keys, torch.arange(8)[None, None])
    golden = [-0.942926, -0.554484, -0.662228, -0.273786, 0.574282, 0.466538, 0.854980, -0.251598]
    found = LayerFilters(GOLDEN[None]).of(observation)
    torch.testing.assert_close(found[0, 0], torch.tensor(golden), atol=2e-6, rtol=0)


def test_a_filter_is_the_first_singular_vector_of_all_queries_and_the_groups_mean():
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 6, 50, 8, generator=draw) + 2 * torch.randn(3, 6, 1, 8, generator=draw)
    pieces = [QuerySums.of(list(queries[:, :, part])) for part in (slice(20), slice(20, 50))]
    found = (pieces[0] + pieces[1]).filters(2)
    for layer in range(3):
        for head in range(2):
            directions = []
            for of_head in queries[layer, 3 * head : 3 * head + 3].double():
                u = torch.linalg.svd(of_head).Vh[0]
                directions.append(u if (of_head @ u).mean() > 0 else -u)
            expected = torch.stack(directions).mean(0)
            torch.testing.assert_close(found[layer, head], expected, atol=1e-9, rtol=0)


# --- kept sets ---------------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("chunk", [None, 16])
def test_kept_entries_are_those_of_a_float64_reference(tmp_path, group, lengths, chunk):
    model = model_of(group)
    ids, mask = prompts(lengths)
    scores = products(model, ids, mask)
    cache = CompressedCache(model, qfilter_of(model, tmp_path), SIZE)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
    assert positions(cache) == best(scores, SIZE)


def test_the_kept_entries_are_those_of_kvpress_with_filters_of_the_other_sign(tmp_path):
    model = model_of(3)
    ids, _ = prompts((64,))
    published = -random_filters(model).double()
    cache = model(ids, use_cache=True).past_key_values
    cached = [layer.keys for layer in cache.layers]
    # QFilterPress.score, then ScorerPress: the best int(n·(1 − ratio)) of each head
    scores = [-(published[i][None, :, None] * keys).sum(-1) for i, keys in enumerate(cached)]
    kept = int(64 * (1 - 0.75))
    expected = [best(of_layer, kept) for of_layer in scores]
    reader = start(model, qfilter_of(model, tmp_path), budget=0.25)
    assert positions(reader.cache) == expected


def test_adakv_shares_a_layers_size_by_these_scores(tmp_path):
    model = model_of(3)
    ids, mask = prompts((64,))
    scores = products(model, ids, mask)[:, 0]
    reader = start(model, qfilter_of(model, tmp_path, " + adakv:floor=0"))
    for layer, found in zip(scores, positions(reader.cache), strict=True):
        chosen = torch.zeros(layer.numel(), dtype=torch.bool)
        chosen[layer.flatten().topk(SIZE * len(layer)).indices] = True
        expected = [head.nonzero().flatten().tolist() for head in chosen.view(layer.shape)]
        assert found[0] == expected


def test_rounds_rank_the_answer_by_the_same_scores(tmp_path):
    model = model_of(3)
    ids, _ = prompts((64,))
    reader = start(model, qfilter_of(model, tmp_path, " + every:interval=4"))
    decode(reader, steps=4)
    read = torch.cat([ids, continuation(1, 4)], 1)
    scores = products(model, read, torch.ones_like(read))[0, 0]
    first = scores[..., :64].topk(SIZE).indices
    allowed = torch.full_like(scores, -torch.inf).scatter(1, first, 0)
    allowed[..., 64:] = 0
    # Of the first layer alone: deeper entries depend on what was kept before.
    assert positions(reader.cache)[0][0] == best(scores + allowed, SIZE)


def test_a_padded_row_is_its_prompt_alone(tmp_path):
    model = model_of(3)
    spec = qfilter_of(model, tmp_path, " + every:interval=3")
    ids, mask = prompts(PADDED)
    options = {"do_sample": False, "max_new_tokens": 8}
    cache = CompressedCache(model, spec, SIZE)
    batch = kvfold.generate(model, ids, cache=cache, attention_mask=mask, **options)
    for row, length in enumerate(PADDED):
        padding = 64 - length
        alone = CompressedCache(model, spec, SIZE)
        out = kvfold.generate(model, ids[row : row + 1, padding:], cache=alone, **options)
        assert torch.equal(out[0], batch[row, padding:])
        for layer, expected in zip(positions(cache), positions(alone), strict=True):
            assert [[at - padding for at in head] for head in layer[row]] == expected[0]


# --- stored contexts -----------------------------------------------------------------------------


def test_a_saved_context_shrinks_without_the_model_to_what_it_would_have_been(tmp_path):
    model, tokenizer = new_model(), word_tokenizer()
    spec = qfilter_of(model, tmp_path)
    text = "red house garden blue stone " * 20
    large, small = (kvfold.compress(model, tokenizer, text, spec, part) for part in (0.5, 0.2))
    large.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    model.forward = None  # no forward from here on
    for context in (large, loaded):
        assert positions(context.shrink(0.2).cache) == positions(small.cache)


def test_one_reading_serves_qfilter_and_other_methods(tmp_path):
    model = model_of(3)
    spec = qfilter_of(model, tmp_path)
    ids, _ = prompts((64,))
    alone = start(model, spec).cache
    reader = CompressedCache(model, "keydiff", 30)
    with reader.reading():
        Reader(model, reader)(ids)
        other = reader.to_budget(SIZE, spec)
    assert positions(other) == positions(alone)


# --- files ---------------------------------------------------------------------------------------


def test_the_bundled_model_has_filters():
    model, tokenizer = kvfold.bundled_model()
    text = "The locker of Aiko Berg is 48213. It was a quiet evening in the garden. " * 8
    context = kvfold.compress(model, tokenizer, text, "qfilter", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: build("llama", torch.float64, seed=5), "other weights"),
        (lambda: build("llama", torch.float32), "float64, and the model computes in float32"),
        (lambda: build("llama", torch.float64, rope_theta=500.0), "another RoPE"),
    ],
    ids=["weights", "dtype", "rope"],
)
def test_filters_of_another_model_are_refused_by_what_differs(tmp_path, other, reason):
    spec = qfilter_of(build("llama", torch.float64), tmp_path)
    with pytest.raises(ScorerFileError, match=f"{reason}.*--scorer qfilter.*qfilter:file=FILE"):
        CompressedCache(other(), spec, 10)


def test_a_damaged_file_is_refused(tmp_path):
    model = build("llama", torch.float64)
    spec = qfilter_of(model, tmp_path)
    path = tmp_path / "filters.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ScorerFileError, match="its tensors were altered"):
        CompressedCache(model, spec, 10)


def test_a_scorer_of_zap_is_no_filter_and_filters_are_no_scorer(tmp_path):
    model = build("llama", torch.float64)
    scorer, filters = zap_of(model, tmp_path), qfilter_of(model, tmp_path)
    for given, reason in (
        (scorer.replace("zap", "qfilter", 1), "fitted from kvzip, and is no file for qfilter"),
        (filters.replace("qfilter", "zap", 1), "fitted from qfilter, and is no file for zap"),
    ):
        with pytest.raises(ScorerFileError, match=reason):
            CompressedCache(model, given, 10)
