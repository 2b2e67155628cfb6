# SPDX-License-Identifier: Apache-2.0
"""Models some of whose layers slide: kept entries of the full ones by loops, the others untouched.

For `REAL=gemma3`; skipped where no layer slides. The text is longer than the windows, and all is
written out in float64.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache
from kvfold.fitted.of_model import read_fitted, write_fitted
from kvfold.methods.stages.score.learned import Scorer
from tests.helpers import recall
from tests.helpers.by_hand import WINDOW, ByHand, assert_holds, evict, per_head, with_window
from tests.helpers.caches import positions
from tests.helpers.scorers import linear_scores, pooled_by_hand
from tests.helpers.truth import Reader, stock_cache, worst

pytestmark = pytest.mark.real

TOKENS, BUDGET = 640, 160


@pytest.fixture(scope="module", autouse=True)
def sliding_model(model: Any, slides: bool) -> None:
    if not slides:
        pytest.skip("no layer of this model slides")
    assert model.config.sliding_window < TOKENS


@pytest.fixture(scope="module")
def keys_before_rope() -> dict[int, Tensor]:
    """By layer `[H, T, D]`, noted while `read` is made."""
    return {}


@pytest.fixture(scope="module")
def read(truth: Any, ids: Tensor, keys_before_rope: dict[int, Tensor]) -> ByHand:
    """The text, read by hand; copy it before anything is taken out of it."""
    hooks = []
    for at, layer in enumerate(truth.model.layers):

        def note(_: Any, __: Any, keys: Tensor, at: int = at) -> None:
            keys_before_rope[at] = keys[0]

        hooks.append(layer.self_attn.k_norm.register_forward_hook(note))
    one = ByHand(truth)(ids[:, :TOKENS], logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return one


@pytest.fixture(scope="module")
def fitted(folder: str) -> Path:
    """The scorer that was fitted on the model."""
    file = Path(f"{folder}-scorer.safetensors")
    if not file.is_file():
        pytest.skip(f"{file} is not there: `make fits` makes it for a model of `make real`")
    return file


@pytest.fixture(scope="module")
def zap(model: Any, exact: Any, fitted: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """zap with the fitted scorer, as one of the float64 model."""
    path = tmp_path_factory.mktemp("fitted") / "scorer.safetensors"
    scorer = read_fitted(fitted, model, Scorer)
    write_fitted(path, scorer, exact, written_by="", target="kvzip", texts=0)
    return f"zap:file={path}"


def test_snapkv_keeps_what_the_window_votes_for(exact, ids, read):
    cache = CompressedCache(exact, f"snapkv:window={WINDOW}", BUDGET)
    Reader(exact, cache)(ids[:, :TOKENS], logits_to_keep=1)
    chosen = per_head(lambda head: with_window(head, BUDGET))
    assert_holds(cache, [evict(copy.deepcopy(read), chosen)])


def test_zap_keeps_what_the_fitted_scorer_rates_best(
    model, exact, ids, read, zap, fitted, full_layers, keys_before_rope
):
    cache = CompressedCache(exact, zap, BUDGET)
    Reader(exact, cache)(ids[:, :TOKENS], logits_to_keep=1)
    scorer = read_fitted(fitted, model, Scorer)
    scores = []
    for place, (at, layer) in enumerate(zip(full_layers, read.layers, strict=True)):
        values = torch.stack([head.values for head in layer.heads])
        scores.append(linear_scores(keys_before_rope[at][None], values[None], scorer, place))
    whole = torch.ones(1, TOKENS, dtype=torch.long)
    expected = pooled_by_hand(torch.stack(scores), whole, BUDGET, sinks=4, window=16)
    assert [layer[0] for layer in positions(cache)] == expected[0]


def test_recall_reads_what_the_codes_of_keys_find(exact, truth, ids):
    """A turn, and steps."""
    reader = Reader(exact, CompressedCache(exact, recall.SPEC))
    masked = recall.RecallTruth(truth)
    for each in (reader, masked):
        each(ids[:, :TOKENS], logits_to_keep=1)
    later = ids[:, TOKENS : TOKENS + 13]
    for piece in (later[:, :9], *later[:, 9:].split(1, 1)):
        assert worst(reader(piece), masked(piece)) <= 1e-9


@pytest.mark.parametrize("name", ["snapkv", "kvzip", "zap", "recall"])
def test_sliding_layers_are_transformers_own(
    exact, tokenizer, text, full_layers, name, request: pytest.FixtureRequest
):
    """Their entries are those of transformers' cache, bit for bit, and their bytes told apart."""
    spec = request.getfixturevalue("zap") if name == "zap" else name
    context = kvfold.compress(
        exact, tokenizer, text[:3000], spec, None if name == "recall" else 0.3
    )
    assert context.ids.shape[1] > exact.config.sliding_window
    stock, stats = stock_cache(exact), context.stats()
    Reader(exact, stock)(context.ids, logits_to_keep=1)
    layers = range(exact.config.num_hidden_layers)
    assert stats.layers == full_layers
    assert sorted(stats.other_layers) == [at for at in layers if at not in full_layers]
    for at in stats.other_layers:
        mine, theirs = context.cache.layers[at], stock.layers[at]
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    whole, windows = (
        sum(stock.layers[at].keys.nbytes + stock.layers[at].values.nbytes for at in group)
        for group in (full_layers, stats.other_layers)
    )
    assert stats.nbytes_full == whole and stats.nbytes < 0.4 * whole
    counters = 8 * len(stats.other_layers)  # of the tokens seen, in newer versions
    assert stats.other_bytes in (windows, windows + counters)
