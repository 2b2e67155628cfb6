# SPDX-License-Identifier: Apache-2.0
"""duo: kept sets by hand and as kvpress masks them; rounds of streaming heads; files refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import BudgetError, CompressedCache, KvfoldError, ScorerFileError
from kvfold.fitted.of_model import write_fitted
from kvfold.methods.stages.allocate.retrieval import RetrievalScores
from kvfold.observers.fitted import HeadNumbers
from tests.helpers.caches import BATCHES, PADDED, decode, positions, start
from tests.helpers.contexts import assert_same, new_model
from tests.helpers.exactness import against_truth
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

SINKS, RECENT = 2, 6
WINDOW = SINKS + RECENT


def model_of(group: int) -> Any:
    heads = {1: (4, 4), 3: (6, 2), 8: (8, 1)}[group]
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 96}
    return build("llama", torch.float64, **sizes)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(3)


def scores_of(model: Any, seed: int = 0) -> Tensor:
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def duo_of(model: Any, folder: Path, options: str = "") -> str:
    """The text of duo with a table of random scores for the model, written into `folder`."""
    rows = ["\t".join(f"{score:.9f}" for score in row) for row in scores_of(model).tolist()]
    (folder / "heads.tsv").write_text("\n".join(rows) + "\n")
    return f"duo:file={folder / 'heads.tsv'},sinks={SINKS},recent={RECENT}{options}"


def by_hand(scores: Tensor, length: int, retrieval: int, window: int = WINDOW) -> list[Any]:
    """Kept positions `[L][H]`: all in the `retrieval` best heads, first and last in the others."""
    best = sorted(range(scores.numel()), key=lambda i: -float(scores.flatten()[i]))[:retrieval]
    ends = [at for at in range(length) if at < SINKS or at >= length - (window - SINKS)]
    heads = [[*range(length)] if i in best else ends for i in range(scores.numel())]
    width = scores.shape[1]
    return [heads[first : first + width] for first in range(0, len(heads), width)]


def most_that_fit(scores: Tensor, length: int, budget: int) -> tuple[int, int]:
    """The largest number of retrieval heads within the budget, and the others' size."""
    window, heads = min(WINDOW, budget), scores.numel()
    fit = [n for n in range(heads + 1) if n * length + (heads - n) * window <= budget * heads]
    return max(fit), window


# --- kept sets ---------------------------------------------------------------------------------


@BATCHES
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("budget", [5, 20, 40])
def test_as_many_heads_keep_everything_as_fit(tmp_path, group, lengths, chunk, budget):
    model = model_of(group)
    ids, mask = prompts(lengths)
    cache = CompressedCache(model, duo_of(model, tmp_path), budget)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
    scores = scores_of(model)
    for row, length in enumerate(lengths):
        padding = 64 - length
        expected = by_hand(scores, length, *most_that_fit(scores, length, budget))
        found = [[[at - padding for at in head] for head in of[row]] for of in positions(cache)]
        assert found == expected


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_streaming_heads_are_those_of_kvpress(model, tmp_path, ratio):
    scores = scores_of(model).numpy()
    # DuoAttentionPress: the round(L·H·ratio) lowest stream, and lose [sinks : −recent]
    streaming = round(scores.size * ratio)
    order = scores.argsort(axis=None)[:streaming].tolist()
    masked = [i in order for i in range(scores.size)]
    expected = [
        [at for at in range(64) if not gone or not SINKS <= at < 64 - RECENT] for gone in masked
    ]
    entries = sum(map(len, expected))
    reader = start(model, duo_of(model, tmp_path), budget=-(-entries // scores.size))
    assert [head for layer in positions(reader.cache) for head in layer[0]] == expected


def test_a_threshold_takes_no_budget(model, tmp_path):
    spec = duo_of(model, tmp_path, ",threshold=0.5")
    scores = scores_of(model)
    count = int((scores >= 0.5).sum())
    assert 0 < count < scores.numel()
    ids, _ = prompts((64,))
    cache = CompressedCache(model, spec)
    Reader(model, cache)(ids)
    assert [layer[0] for layer in positions(cache)] == by_hand(scores, 64, count)
    with pytest.raises(BudgetError, match="takes no budget"):
        CompressedCache(model, spec, 0.5)
    assert kvfold.parse("duo_paper").threshold == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.1, 0.25, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("group", [1, 3])
def test_heads_below_the_quantile_stream_as_released(tmp_path, group, sparsity):
    model = model_of(group)
    spec = duo_of(model, tmp_path, f",sparsity={sparsity}").replace("duo:", "duo_official:")
    scores = scores_of(model)
    # sparsify_attention_heads: the quantile, but 2 from a sparsity of 1 on
    least = np.quantile(scores.double().numpy(), sparsity) if sparsity < 1 else 2
    streaming = scores.numpy() < least
    cache = CompressedCache(model, spec)
    Reader(model, cache)(prompts((64,))[0])
    expected = by_hand(scores, 64, int((~streaming).sum()))
    assert [layer[0] for layer in positions(cache)] == expected
    assert kvfold.parse("duo_official") == kvfold.parse("duo:sparsity=0.5")


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("options", ["", " + every:interval=3"])
def test_logits_are_those_of_hidden_entries(model, tmp_path, lengths, options):
    spec = duo_of(build("llama"), tmp_path) + options
    off, effect, _ = against_truth("llama", spec, lengths, torch.float64, every_step=bool(options))
    assert off < 1e-6 < 1e-3 < effect


# --- while decoding ----------------------------------------------------------------------------


def test_without_rounds_all_heads_grow(model, tmp_path):
    reader = start(model, duo_of(model, tmp_path))
    before = positions(reader.cache)
    decode(reader, steps=5)
    grown = [[[[*head, *range(64, 69)] for head in row] for row in of] for of in before]
    assert positions(reader.cache) == grown


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("options", ["", ",threshold=0.5"])
def test_streaming_heads_roll_and_retrieval_heads_grow(model, tmp_path, interval, options):
    spec = duo_of(model, tmp_path, options) + f" + every:interval={interval}"
    ids, _ = prompts((64,))
    cache = CompressedCache(model, spec, None if options else 40)
    reader = Reader(model, cache)
    reader(ids)
    scores = scores_of(model)
    retrieval = int((scores >= 0.5).sum()) if options else most_that_fit(scores, 64, 40)[0]
    assert 0 < retrieval < scores.numel()
    for step, token in enumerate(continuation(1, 10).split(1, 1), 1):
        reader(token)
        since = step % interval
        settled = by_hand(scores, 64 + step - since, retrieval)
        new = list(range(64 + step - since, 64 + step))
        expected = [[head + new for head in layer] for layer in settled]
        assert [layer[0] for layer in positions(cache)] == expected


@pytest.mark.parametrize("first", [1, 3])
def test_a_short_prompt_is_rolled_too(model, tmp_path, first):
    spec = duo_of(model, tmp_path, ",threshold=0.5") + " + every:interval=1"
    cache = CompressedCache(model, spec)
    reader = Reader(model, cache)
    reader(prompts((64,))[0][:, :first])
    for token in continuation(1, 15).split(1, 1):
        reader(token)
    scores = scores_of(model)
    expected = by_hand(scores, first + 15, int((scores >= 0.5).sum()))
    assert [layer[0] for layer in positions(cache)] == expected


@pytest.mark.parametrize("options", ["", " + every:interval=3"])
def test_a_padded_row_is_its_prompt_alone(model, tmp_path, options):
    spec = duo_of(model, tmp_path) + options
    ids, mask = prompts(PADDED)
    greedy = {"do_sample": False, "max_new_tokens": 8}
    cache = CompressedCache(model, spec, 20)
    batch = kvfold.generate(model, ids, cache=cache, attention_mask=mask, **greedy)
    for row, length in enumerate(PADDED):
        padding = 64 - length
        alone = CompressedCache(model, spec, 20)
        out = kvfold.generate(model, ids[row : row + 1, padding:], cache=alone, **greedy)
        assert torch.equal(out[0], batch[row, padding:])
        for layer, expected in zip(positions(cache), positions(alone), strict=True):
            assert [[at - padding for at in head] for head in layer[row]] == expected[0]


def test_a_row_that_has_ended_keeps_its_entries(model, tmp_path):
    spec = duo_of(model, tmp_path) + " + every:interval=4"
    ids, mask = prompts((64, 64))
    reader = Reader(model, CompressedCache(model, spec, 20), mask)
    reader(ids)
    tokens = continuation(2, 8)
    tokens[1, 2:] = 0
    for token in tokens.split(1, 1):
        reader(token)
    ended = [head for layer in positions(reader.cache) for head in layer[1]]
    assert all(head[-2:] == [64, 65] for head in ended)
    rolled = [head for layer in positions(reader.cache) for head in layer[0]]
    assert min(map(len, rolled)) == WINDOW and max(map(len, rolled)) == 72


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", " + every:interval=3"])
def test_a_saved_context_goes_on_as_the_original(tmp_path, options):
    model, tokenizer = new_model(), word_tokenizer()
    spec = duo_of(model, tmp_path) + options
    context = kvfold.compress(model, tokenizer, "red house garden blue stone " * 20, spec, 0.5)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert_same(loaded.cache, context.cache)
    readers = [Reader(model, each.cache) for each in (context, loaded)]
    for token in (continuation(1, 7) % model.config.vocab_size).split(1, 1):
        mine, theirs = (reader(token) for reader in readers)
        assert torch.equal(mine, theirs)
    assert positions(context.cache) == positions(loaded.cache)


# --- files ---------------------------------------------------------------------------------------


def test_the_bundled_model_has_scores():
    model, tokenizer = kvfold.bundled_model()
    text = "The locker of Aiko Berg is 48213. It was a quiet evening in the garden. " * 8
    context = kvfold.compress(model, tokenizer, text, "duo:sinks=4,recent=16", 0.5)
    seen = context.stats().seen
    kept = [head for layer in context.stats().kept for row in layer for head in row]
    assert set(kept) == {20, seen}
    assert 0.4 < context.stats().kept_fraction <= 0.5


def test_a_table_is_clipped(model, tmp_path):
    for scores, text in ((scores_of(model), "-0.1 1.2"), (scores_of(model), "0 1")):
        rows = "\n".join([text] * len(scores))
        (tmp_path / f"{text}.tsv").write_text(rows, encoding="utf-8-sig" if "." in text else None)
    names = ["-0.1 1.2.tsv", "0 1.tsv"]
    read = []
    for name in names:
        cache = CompressedCache(model, f"duo:file={tmp_path / name}", 0.5)
        read.append(torch.stack([state.observers[HeadNumbers].value for state in cache.states]))
    assert torch.equal(*read)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.1 0.2", r"is of 1 layers of 2 KV heads, and 4 layers of 2 are compressed"),
        ("0.1\n0.2", r"is of 2 layers of 1 KV heads"),
        ("0.1 0.2\n0.3", "cannot read"),
        ("0.1 x\n0.3 0.2", "cannot read"),
        ("0.1 nan\n0.3 0.2", "finite"),
        ("", "finite"),
    ],
)
def test_a_table_of_other_heads_is_refused(model, tmp_path, text, reason):
    (tmp_path / "heads.txt").write_text(text)
    with pytest.raises(ScorerFileError, match=reason):
        CompressedCache(model, f"duo:file={tmp_path / 'heads.txt'}", 0.5)


def test_a_fitted_file_of_another_model_is_refused(model, tmp_path):
    path = tmp_path / "heads.safetensors"
    fitted = RetrievalScores(scores_of(model))
    write_fitted(path, fitted, model, written_by="", target="duo", texts=0)
    assert (
        CompressedCache(model, f"duo:file={path}", 0.5).states[0].observers[HeadNumbers].value
        is not None
    )
    with pytest.raises(ScorerFileError, match=r"another model.*--scorer duo"):
        CompressedCache(build("llama", torch.float64, seed=3), f"duo:file={path}", 0.5)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ScorerFileError, match="cannot read"):
        CompressedCache(model, f"duo:file={path}", 0.5)


@pytest.mark.parametrize("options", ["sinks=-1", "recent=0", "threshold=1.5"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError, match="duo"):
        kvfold.parse(f"duo:{options}")
