# SPDX-License-Identifier: Apache-2.0
"""fair: spans keep their shares, the best of each by the other method's score."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import CompressedCache, IllegalComposition, KvfoldError, parse
from kvfold.methods.stages.select.spans import quotas
from tests.helpers.budgets import SMALL
from tests.helpers.caches import ALONE, BATCHES, PADDED, positions, start
from tests.helpers.exactness import against_truth
from tests.helpers.models import build, prompts

SPANS = ((4, 12), (12, 15))
FAIR = "fair:spans=4/12/12/15"


def counts_of(kept: list[int], length: int) -> list[int]:
    """Kept tokens of each span, and of the rest."""
    inside = [sum(start <= place < stop for place in kept) for start, stop in SPANS]
    return [*inside, len(kept) - sum(inside)]


@BATCHES
@pytest.mark.parametrize("spec", ["keydiff", "knorm", "random"])
def test_spans_keep_their_shares(spec, lengths) -> None:
    model = build("llama")
    unfair, fair = (start(model, each, lengths).cache for each in (spec, f"{spec} + {FAIR}"))
    seen = []
    for cache in (unfair, fair):
        for layer in positions(cache):
            for row, length in zip(layer, lengths, strict=True):
                for head in row:
                    places = [column - (64 - length) for column in head]
                    seen.append((cache is fair, counts_of(places, length), length))
    for is_fair, found, length in seen:
        sizes = [8, 3, length - 11]
        assert not is_fair or found == quotas(SMALL, sizes, [0, 0, 0])
    assert any(not is_fair and found[0] == 0 for is_fair, found, _ in seen) or spec == "random"


@pytest.mark.slow
def test_inside_a_span_the_score_decides() -> None:
    model = build("llama")
    every = start(model, "keydiff + fair:spans=0/32").cache
    for layer in range(len(every.states)):
        for head, kept in enumerate(every.positions(layer)[0]):
            scores = start(model, "keydiff", ALONE, budget=1.0).cache.states[layer]
            keys = scores.stored().keys[0, head].float()
            mean = torch.nn.functional.normalize(keys, dim=-1).mean(0)
            rank = -torch.nn.functional.cosine_similarity(keys, mean[None], dim=-1)
            best = sorted(range(32), key=lambda place: (-float(rank[place]), place))[:10]
            assert [place for place in kept.tolist() if place < 32] == sorted(best)


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", "snapkv:window=8 + adakv"])
def test_answers_are_those_of_the_kept_tokens(spec, lengths) -> None:
    off, effect, _ = against_truth(
        "llama", f"{spec} + {FAIR}", lengths, torch.float64, every_step=False
    )
    assert off <= 1e-6 and effect > 1e-3


@pytest.mark.slow
def test_a_row_keeps_what_it_keeps_alone() -> None:
    model, spec = build("llama"), f"snapkv:window=8 + {FAIR}"
    batch, (ids, _) = start(model, spec, PADDED).cache, prompts(PADDED)
    for row, length in enumerate(PADDED):
        alone = CompressedCache(model, spec, SMALL)
        with torch.no_grad():
            model(ids[row : row + 1, -length:], past_key_values=alone)
        for ours, theirs in zip(positions(batch), positions(alone), strict=True):
            assert [[place - (64 - length) for place in head] for head in ours[row]] == theirs[0]


def test_what_is_no_span_is_refused() -> None:
    for wrong in ("4", "4/4", "9/4", "4/9/8/12"):
        with pytest.raises(KvfoldError, match="starts and stops in turn"):
            parse(f"snapkv + fair:spans={wrong}")
    with pytest.raises(KvfoldError, match="takes whole numbers with / between them, not '0-40'"):
        parse("snapkv + fair:spans=0-40")
    with pytest.raises(KvfoldError, match="takes the spans to be fair to"):
        start(build("llama"), "snapkv:window=8 + fair")
    with pytest.raises(IllegalComposition, match="evicts nothing itself"):
        parse("fair:spans=0/4").stages()
    with pytest.raises(IllegalComposition, match="select stage"):
        parse("chunkkv + fair:spans=0/4")
    assert str(parse(f"snapkv + {FAIR}")) == f"snapkv + {FAIR}"
    assert kvfold.Fair(spans=(4, 12, 12, 15)) == parse(FAIR)
