# SPDX-License-Identifier: Apache-2.0
"""zap: kept sets by hand in float64, stored contexts, and files of other models refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvfold
from kvfold import CompressedCache, KvfoldError, ScorerFileError
from kvfold.cache.observe import observation_of_stored
from kvfold.methods.stages.allocate.pool import pooled
from kvfold.methods.stages.select.top import top
from tests.helpers.caches import GREEDY, PADDED, decode, start
from tests.helpers.contexts import new_model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.scorers import pooled_by_hand, random_scorer, scores_by_hand, zap_of
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

SIZE = 20


def model_of(group: int, **changes: Any) -> Any:
    heads = {1: (4, 4), 3: (6, 2), 8: (8, 1)}[group]
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 96}
    return build("llama", torch.float64, **sizes, **changes)


def columns(cache: CompressedCache) -> list[list[list[list[int]]]]:
    """Kept columns `[B][L][H]`."""
    layers = [cache.positions(layer) for layer in range(len(cache.states))]
    rows = range(cache.rows)
    return [[[head.tolist() for head in layer[row]] for layer in layers] for row in rows]


# --- kept sets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("chunk", [None, 16])
def test_one_pool_keeps_what_a_float64_reference_keeps(tmp_path, group, lengths, chunk):
    model = model_of(group)
    ids, mask = prompts(lengths)
    scores = scores_by_hand(model, ids, mask, random_scorer(model))
    expected = pooled_by_hand(scores, mask, SIZE, sinks=4)
    cache = CompressedCache(model, zap_of(model, tmp_path), SIZE)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
    assert columns(cache) == expected


@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
def test_a_floor_is_kept_in_every_head_and_the_rest_in_one_pool(tmp_path, lengths):
    model = model_of(3)
    ids, mask = prompts(lengths)
    scores = scores_by_hand(model, ids, mask, random_scorer(model))
    expected = pooled_by_hand(scores, mask, SIZE, sinks=4, least=SIZE // 2)
    assert expected != pooled_by_hand(scores, mask, SIZE, sinks=4)
    cache = CompressedCache(model, zap_of(model, tmp_path, ",floor=0.5"), SIZE)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, **options)
    assert columns(cache) == expected


def test_equal_heads_keep_their_best(tmp_path):
    model = model_of(3)
    ids, mask = prompts((64,))
    scores = scores_by_hand(model, ids, mask, random_scorer(model))[:, 0]
    scores[..., :2] = torch.inf
    cache = CompressedCache(model, zap_of(model, tmp_path, ",level=uniform,sinks=2"), SIZE)
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    kept = scores.topk(SIZE).indices.sort().values.tolist()
    new = list(range(64, 71))
    assert columns(cache)[0] == [[head + new for head in layer] for layer in kept]


def test_adakv_shares_a_layers_size_by_these_scores(tmp_path):
    model = model_of(3)
    ids, mask = prompts((64,))
    scores = scores_by_hand(model, ids, mask, random_scorer(model))[:, 0]
    spec = zap_of(model, tmp_path, ",level=uniform,sinks=0 + adakv:floor=0")
    cache = CompressedCache(model, spec, SIZE)
    Reader(model, cache)(ids)
    for layer, found in zip(scores, columns(cache)[0], strict=True):
        best = layer.flatten().topk(SIZE * len(layer)).indices
        chosen = torch.zeros(layer.numel(), dtype=torch.bool)
        chosen[best] = True
        expected = [head.nonzero().flatten().tolist() for head in chosen.view(layer.shape)]
        assert found == expected


def test_rounds_rank_the_answer_by_the_same_scores(tmp_path):
    model = model_of(3)
    ids, _ = prompts((64,))
    spec = zap_of(model, tmp_path, ",level=uniform,sinks=0 + every:interval=4")
    reader = start(model, spec)
    decode(reader, steps=4)
    read = torch.cat([ids, continuation(1, 4)], 1)
    scores = scores_by_hand(model, read, torch.ones_like(read), random_scorer(model))[:, 0]
    first = scores[..., :64].topk(SIZE).indices
    allowed = torch.full_like(scores, -torch.inf).scatter(2, first, 0)
    allowed[..., 64:] = 0
    # Later keys and values follow from the full cache here, from the kept entries there.
    kept = (scores + allowed).topk(SIZE).indices.sort().values
    found = torch.tensor(columns(reader.cache)[0])
    assert found.shape == kept.shape
    assert (found[0] == kept[0]).all()  # the first layer's entries depend on their token alone


# --- contexts that are stored ------------------------------------------------------------------


def test_a_stored_context_is_scored_and_shrunk_without_the_model(tmp_path):
    model = model_of(3)
    spec = zap_of(model, tmp_path, ",sinks=0")
    ids, _ = prompts((64,))
    caches = [CompressedCache(model, spec, size) for size in (40, 12)]
    for cache in caches:
        Reader(model, cache)(ids)
    large, small = caches
    model.forward = None  # no forward from here on
    observations = [observation_of_stored(state) for state in large.states]
    scores = [
        seen.learned_scores().masked_fill(seen.positions < 0, -torch.inf) for seen in observations
    ]
    counts = pooled(scores, torch.tensor([12.0]))
    for state, of_layer, count, wanted in zip(
        large.states, scores, counts, small.states, strict=True
    ):
        slots = top(of_layer, count)
        kept = state.columns().gather(2, slots.clamp(min=0)).masked_fill(slots < 0, -1)
        expected = wanted.columns()
        for mine, theirs in zip(kept[0], expected[0], strict=True):
            assert mine[mine >= 0].tolist() == theirs[theirs >= 0].tolist()


@pytest.mark.parametrize("spec", ["zap", "zap:level=uniform"])
def test_a_context_without_kept_scores_shrinks_to_what_it_would_have_been(tmp_path, spec):
    model, tokenizer = kvfold.bundled_model()
    text = "The locker of Aiko Berg is 48213. It was a quiet evening in the garden. " * 8
    large, small = (kvfold.compress(model, tokenizer, text, spec, part) for part in (0.5, 0.2))
    large.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    model.forward = None  # no forward from here on
    for context in (large, loaded):
        assert columns(context.shrink(0.2).cache) == columns(small.cache)


def test_a_loaded_context_has_the_same_scores(tmp_path):
    model, tokenizer = new_model(), word_tokenizer()
    spec = zap_of(model, tmp_path)
    context = kvfold.compress(model, tokenizer, "red house garden " * 20, spec, 0.5)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    for mine, theirs in zip(loaded.cache.states, context.cache.states, strict=True):
        same = [observation_of_stored(state).learned_scores() for state in (mine, theirs)]
        assert torch.equal(*same)


def test_one_reading_serves_zap_and_other_methods(tmp_path):
    model = model_of(3)
    spec = zap_of(model, tmp_path)
    ids, _ = prompts((64,))
    alone = CompressedCache(model, spec, SIZE)
    Reader(model, alone)(ids)
    reader = CompressedCache(model, "keydiff", 30)
    with reader.reading():
        Reader(model, reader)(ids)
        other = reader.to_budget(SIZE, spec)
    assert columns(other) == columns(alone)


# --- the bundled scorer, and files ---------------------------------------------------------------


def test_the_bundled_model_has_a_scorer():
    model, tokenizer = kvfold.bundled_model()
    text = "The locker of Aiko Berg is 48213. It was a quiet evening in the garden. " * 8
    context = kvfold.compress(model, tokenizer, text, "zap", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


def test_the_bundled_scorer_is_of_no_other_model():
    with pytest.raises(ScorerFileError, match=r"another model.*kvfold fit"):
        CompressedCache(build("llama"), "zap", 10)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: build("llama", torch.float64, seed=5), "other weights"),
        (lambda: build("llama", torch.float64, num_hidden_layers=3), "num_hidden_layers 3 here"),
        (lambda: build("llama", torch.float32), "float64, and the model computes in float32"),
        (lambda: build("llama", torch.float64, rope_theta=500.0), "another RoPE"),
    ],
    ids=["weights", "layers", "dtype", "rope"],
)
def test_a_scorer_of_another_model_is_refused_by_what_differs(tmp_path, other, reason):
    spec = zap_of(build("llama", torch.float64), tmp_path)
    with pytest.raises(ScorerFileError, match=reason):
        CompressedCache(other(), spec, 10)


def damaged(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "text":
        path.write_text("no tensors")
    else:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if how == "numbers":
            tensors["weights"][0, 0, 0] += 1
        elif how == "header":
            metadata["header"] = metadata["header"].replace("kvzip", "other")
        elif how == "version":
            metadata["kvfold_scorer"] = "9"
        elif how == "other":
            metadata = {}
        save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "cannot read"),
        ("cut", "cannot read"),
        ("text", "cannot read"),
        ("numbers", "its tensors were altered"),
        ("header", "its header was altered"),
        ("version", "format version '9'"),
        ("other", "no fitted scorer"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, how, reason):
    model = build("llama", torch.float64)
    spec = zap_of(model, tmp_path)
    damaged(tmp_path / "scorer.safetensors", how)
    with pytest.raises(ScorerFileError, match=reason):
        CompressedCache(model, spec, 10)


def test_options_out_of_range_are_refused():
    for wrong in ("sinks=-1", "floor=1.5", "level=uniform,floor=0.1"):
        with pytest.raises(KvfoldError, match=f"zap:{wrong.split(',')[-1].split('=')[0]}"):
            kvfold.parse(f"zap:{wrong}")
