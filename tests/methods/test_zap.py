# SPDX-License-Identifier: Apache-2.0
"""zap: kept sets by hand in float64, stored contexts, and files of other models refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kvfold
from kvfold import CompressedCache, IllegalComposition, KvfoldError, ScorerFileError
from kvfold.cache.observe import observation_of_stored
from kvfold.fitted.of_model import read_fitted, write_fitted
from kvfold.methods.stages.allocate.parts import Curve
from kvfold.methods.stages.allocate.pool import pooled
from kvfold.methods.stages.allocate.retrieval import RetrievalScores
from kvfold.methods.stages.score.distant_queries import Centres
from kvfold.methods.stages.score.filters import Filters
from kvfold.methods.stages.score.learned import Scorer
from kvfold.methods.stages.select.top import top
from tests.helpers.by_hand import QUERY_HEADS, ByHand, before_rope, best, model_with
from tests.helpers.caches import GREEDY, PADDED, decode, start
from tests.helpers.contexts import new_model
from tests.helpers.models import build, prompts
from tests.helpers.rounds import assert_each_round
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


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("chunk", [None, 16])
def test_one_pool_keeps_what_a_float64_reference_keeps(tmp_path, group, lengths, chunk):
    model = model_of(group)
    ids, mask = prompts(lengths)
    scores = scores_by_hand(model, ids, mask, random_scorer(model))
    expected = pooled_by_hand(scores, mask, SIZE, sinks=4, window=3)
    cache = CompressedCache(model, zap_of(model, tmp_path, ",window=3"), SIZE)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
    assert columns(cache) == expected


@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
def test_a_floor_is_kept_in_every_head_and_the_rest_in_one_pool(tmp_path, lengths):
    model = model_of(3)
    ids, mask = prompts(lengths)
    scores = scores_by_hand(model, ids, mask, random_scorer(model))
    expected = pooled_by_hand(scores, mask, SIZE, sinks=4, window=3, least=SIZE // 2)
    assert expected != pooled_by_hand(scores, mask, SIZE, sinks=4, window=3)
    cache = CompressedCache(model, zap_of(model, tmp_path, ",floor=0.5,window=3"), SIZE)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, **options)
    assert columns(cache) == expected


def test_equal_heads_keep_their_best(tmp_path):
    model = model_of(3)
    ids, mask = prompts((64,))
    scores = scores_by_hand(model, ids, mask, random_scorer(model))[:, 0]
    scores[..., :2] = scores[..., -3:] = torch.inf
    spec = zap_of(model, tmp_path, ",level=uniform,sinks=2,window=3")
    cache = CompressedCache(model, spec, SIZE)
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    kept = scores.topk(SIZE).indices.sort().values.tolist()
    new = list(range(64, 71))
    assert columns(cache)[0] == [[head + new for head in layer] for layer in kept]


def test_adakv_shares_a_layers_size_by_these_scores(tmp_path):
    model = model_of(3)
    ids, mask = prompts((64,))
    scores = scores_by_hand(model, ids, mask, random_scorer(model))[:, 0]
    spec = zap_of(model, tmp_path, ",level=uniform,sinks=0,window=0 + adakv:floor=0")
    cache = CompressedCache(model, spec, SIZE)
    Reader(model, cache)(ids)
    for layer, found in zip(scores, columns(cache)[0], strict=True):
        best = layer.flatten().topk(SIZE * len(layer)).indices
        chosen = torch.zeros(layer.numel(), dtype=torch.bool)
        chosen[best] = True
        expected = [head.nonzero().flatten().tolist() for head in chosen.view(layer.shape)]
        assert found == expected


# --- rounds, by hand in float64 ----------------------------------------------------------------


def scores_of(one: ByHand, scorer: Scorer, sinks: int, window: int) -> list[list[Tensor]]:
    """Scores `[L][H]` of what is stored now, each `[T]`, +∞ at the first tokens and the newest."""
    scores = []
    for weights, scales, layer in zip(scorer.weights, scorer.scales, one.layers, strict=True):
        of_layer = []
        for weight, scale, head in zip(weights.double(), scales.double(), layer.heads, strict=True):
            keys, values = before_rope(head), head.values
            norms = [x.pow(2).sum(-1, keepdim=True).sqrt() for x in (keys, values)]
            x = torch.cat([keys, values, *norms, torch.ones_like(norms[0])], -1) / scale
            x = torch.cat([x, torch.tanh(x @ scorer.projections.double())], -1)
            forced = torch.tensor(head.positions) < sinks
            forced[len(forced) - window :] = True
            of_layer.append((x @ weight).masked_fill(forced, torch.inf))
        scores.append(of_layer)
    return scores


def size_heads(one: ByHand, scores: list[list[Tensor]], pool: bool) -> None:
    """Sizes of the heads: the same, or the places of each among the best of all that is stored."""
    each = [score for layer in scores for score in layer]
    if not pool:
        one.sizes = [SIZE] * len(each)
    elif sum(map(len, each)) > SIZE * len(each):
        best = torch.cat(each).argsort(descending=True, stable=True)[: SIZE * len(each)]
        chosen = torch.zeros(sum(map(len, each)), dtype=torch.bool)
        chosen[best] = True
        one.sizes = [int(part.sum()) for part in chosen.split([len(score) for score in each])]


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("level", ["pair", "uniform"])
@pytest.mark.parametrize("heads", QUERY_HEADS)
@pytest.mark.parametrize("lengths", [(64, 53, 24), (17,)], ids=["padded", "short"])
def test_rounds_by_hand(tmp_path, lengths, heads, level):
    """Four rounds in all layers; a pool sizes its heads when entries first leave, and once."""
    model = model_with(heads, "kvfold")
    scorer = random_scorer(model)

    def keep_best(one: ByHand) -> None:
        scores = scores_of(one, scorer, sinks=4, window=3)
        if not hasattr(one, "sizes"):
            size_heads(one, scores, pool=level == "pair")
        if not hasattr(one, "sizes"):
            return
        each = [head for layer in one.layers for head in layer.heads]
        flat = [score for layer in scores for score in layer]
        for head, score, size in zip(each, flat, one.sizes, strict=True):
            head.keep(best(score, max(size, 4 + 3)))

    spec = zap_of(model, tmp_path, f",level={level},window=3 + every:interval=3")
    rows = assert_each_round(spec, keep_best, lengths, 3, lambda one: None, heads=heads)
    assert all(len(set(one.sizes)) > 1 for one in rows) == (level == "pair")


def test_a_pool_beside_the_prompt_is_one_of_the_answer(tmp_path):
    model = model_of(3)
    reader = start(model, zap_of(model, tmp_path, ",sinks=0 + every:interval=4,prompt=kept"))
    decode(reader, 40)
    kept = [head for layer in columns(reader.cache)[0] for head in layer]
    assert all(head[:64] == list(range(64)) for head in kept)
    assert sum(len(head) - 64 for head in kept) == SIZE * len(kept)
    assert len({len(head) for head in kept}) > 1


@pytest.mark.parametrize("budget", [0.5, "64KiB"])
def test_a_pool_in_rounds_keeps_its_size(tmp_path, budget):
    model = model_of(3)
    spec = zap_of(model, tmp_path)
    before = start(model, spec, budget=budget).cache.stats().kept
    reader = start(model, f"{spec} + every:interval=4", budget=budget)
    assert reader.cache.stats().kept == before
    for _ in range(3):
        decode(reader, 4)
        assert reader.cache.stats().kept == before


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 64])
def test_a_pool_in_rounds_goes_on_from_copies_and_files(tmp_path, length):
    model, tokenizer = new_model(), word_tokenizer()
    spec = zap_of(model, tmp_path) + " + every:interval=4"
    context = kvfold.compress(model, tokenizer, "red house garden " * (length // 3), spec, SIZE)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    copied = copy.deepcopy(context.cache)
    steps = torch.randint(3, 12, (1, 30), generator=torch.Generator().manual_seed(1)).split(1, 1)
    for token in steps:
        for cache in (context.cache, copied, loaded.cache):
            with torch.no_grad():
                model(token, past_key_values=cache)
        assert columns(context.cache) == columns(copied) == columns(loaded.cache)


def test_a_pool_is_not_shared_again():
    with pytest.raises(IllegalComposition, match="leave sizes=again out"):
        kvfold.parse("zap + every:sizes=again")


# --- contexts that are stored ------------------------------------------------------------------


def test_a_stored_context_is_scored_and_shrunk_without_the_model(tmp_path):
    model = model_of(3)
    spec = zap_of(model, tmp_path, ",sinks=0,window=0")
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


@pytest.mark.slow
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


def test_equal_scorers_give_equal_files(tmp_path):
    model = build("llama")
    files = set()
    for _ in range(12):
        zap_of(model, tmp_path)
        files.add((tmp_path / "scorer.safetensors").read_bytes())
    assert len(files) == 1


def test_options_out_of_range_are_refused():
    for wrong in ("sinks=-1", "floor=1.5", "level=uniform,floor=0.1"):
        with pytest.raises(KvfoldError, match=f"zap:{wrong.split(',')[-1].split('=')[0]}"):
            kvfold.parse(f"zap:{wrong}")


def altered(tensor: Tensor) -> list[Tensor]:
    """Tensors that no fit gives in place of another one."""
    wider, longer = torch.cat([tensor, tensor], -1), torch.cat([tensor, tensor])
    unlike = [tensor[None], tensor.flatten()[0], tensor[:-1], wider, longer, tensor[:0]]
    return [*unlike, torch.full_like(tensor, torch.nan), tensor.int(), tensor.bool()]


@pytest.mark.parametrize("spec", ["zap", "qfilter", "duo", "snapkv + curve", "triattention"])
def test_crafted_files_are_refused_in_words(tmp_path: Path, spec: str) -> None:
    """Their checksums are right, as of a file that another hand has signed."""
    model, tokenizer = kvfold.bundled_model()
    text, made = "The sky is blue. " * 30, tmp_path / "a.safetensors"
    folder, path = Path(kvfold.__file__).parent / "bundled", tmp_path / "fit.safetensors"
    if spec == "triattention":
        kvfold.fit_centres(model, tokenizer, [text] * 4, path)
    else:
        kind = {"zap": "scorer", "qfilter": "filters", "duo": "heads"}.get(spec, "curve")
        path = folder / f"{kind}.safetensors"
    kinds: dict[str, Any] = {"qfilter": Filters, "zap": Scorer, "duo": RetrievalScores}
    kind = kinds.get(spec, Centres if spec == "triattention" else Curve)
    fitted = read_fitted(path, model, kind)
    budget = 0.5 if kvfold.parse(spec).takes_budget else None
    method = f"{spec}:file={made}"
    for name, tensor in fitted.tensors.items():
        for number, other in enumerate(altered(tensor)):
            wrong = dataclasses.replace(fitted, **{name: other.contiguous()})
            write_fitted(made, wrong, model, written_by="", target="a", texts=number)
            with pytest.raises(KvfoldError):
                kvfold.CompressedCache(model, method, budget, tokenizer=tokenizer)
    write_fitted(made, fitted, model, written_by="", target="a", texts=0)
    kvfold.CompressedCache(model, method, budget, tokenizer=tokenizer)
