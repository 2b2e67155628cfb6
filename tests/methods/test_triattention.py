# SPDX-License-Identifier: Apache-2.0
"""TriAttention: the trigonometric series in float64, its published numbers, rounds by hand."""

from __future__ import annotations

import cmath
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import IllegalComposition, KvfoldError, Observation, ScorerFileError, UnsupportedModel
from kvfold.fitted.of_model import write_fitted
from kvfold.kernels.mean_rotation import pair_norms, rotary_pairs
from kvfold.kernels.query_moments import query_moments
from kvfold.methods.stages.score.distant_queries import Centres, distant_logits, standardized
from kvfold.methods.stages.when import Rounds
from kvfold.methods.triattention import TriAttention, at_later_distances
from kvfold.observers.query_moments import QueryMomentsNeed
from kvfold.policies.method_policy import policy
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PADDED, ByHand, Head, Layer, best, model_with
from tests.helpers.caches import decode, kept, positions, start
from tests.helpers.models import build
from tests.helpers.observations import KEYS, QUERIES, D, T, observed
from tests.helpers.rounds import assert_each_round

FREQUENCIES = torch.tensor([1.0, 0.01])


def turned(vectors: Tensor, shift: Tensor) -> Tensor:
    """Rotary pairs (0, 2) and (1, 3), by `[B]` or `[B, n]` positions."""
    angles = shift.view(len(shift), 1, -1, 1) * FREQUENCIES
    a, b = vectors.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def with_centre(left: int = 0) -> Observation:
    """Eight keys, rotated to their positions after `left` columns of padding, and all queries."""
    seen = observed(left=left)
    pairs = rotary_pairs(turned, D, seen.keys.device)
    return dataclasses.replace(
        seen,
        keys=turned(seen.keys, seen.positions[:, 0].clamp(min=0)),
        observed={QueryMomentsNeed: query_moments(QUERIES[None, None], None, False, pairs)},
        rotate=turned,
        tokens_seen=torch.tensor([T]),
    )


NORMS = [1.828274, 1.467309, 1.369023, 1.640724, 1.372377, 1.625881, 1.317298, 0.959295]
SCORES = {
    "mean": [1.701806, 1.264632, 1.501175, 1.594147, 1.277862, 1.824672, 1.434013, 0.951683],
    "max": [1.744941, 1.281756, 1.537029, 1.727129, 1.319602, 1.890269, 1.476200, 0.973070],
}


@pytest.mark.parametrize("over", SCORES)
@pytest.mark.parametrize("left", [0, 3])
def test_expected_logits(left, over):
    found = distant_logits(with_centre(left), 4, over)[0, 0, 0, left:]
    torch.testing.assert_close(found, torch.tensor(SCORES[over]), atol=2e-6, rtol=0)


def test_centre_and_norms():
    seen = with_centre()
    moments, pairs = seen.query_moments, rotary_pairs(turned, D, seen.keys.device)
    expected = torch.tensor([-0.03125, 0.15625, 0.0625, -0.03125])
    torch.testing.assert_close(moments.mean[0, 0], expected, atol=1e-6, rtol=0)
    lengths = torch.tensor([0.900720, 0.847296] * 2)
    torch.testing.assert_close(moments.moduli[0, 0], lengths, atol=1e-6, rtol=0)
    left = (moments.moduli - pair_norms(moments.mean, pairs))[0, 0] / 2
    found = pair_norms(KEYS, pairs) @ left
    torch.testing.assert_close(found, torch.tensor(NORMS), atol=2e-6, rtol=0)


def test_scores_are_standardized_among_what_may_leave():
    seen = with_centre()
    evictable = (torch.arange(T) >= 3)[None, None]
    logits = torch.tensor(SCORES["mean"])
    among = logits[3:]
    expected = (logits - among.mean()) / among.std(correction=0)
    found = at_later_distances(dataclasses.replace(seen, evictable=evictable), TriAttention(4))
    torch.testing.assert_close(found[0, 0], expected, atol=1e-4, rtol=0)
    alike = standardized(torch.ones(1, 1, 2, T), evictable)
    assert alike.eq(0).all()


def test_pairs_of_neighbours_and_components_without_rope():
    """GPT-J's layout: pairs (0, 1) and (2, 3); component 4 is not rotated."""

    def interleaved(vectors: Tensor, shift: Tensor) -> Tensor:
        x = vectors[..., [0, 2, 1, 3]]
        return torch.cat([turned(x, shift)[..., [0, 2, 1, 3]], vectors[..., 4:]], -1)

    pairs = rotary_pairs(interleaved, 5, torch.device("cpu"))
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2), torch.ones(1, 1))
    assert torch.equal(pairs, expected)
    lengths = pair_norms(torch.tensor([3.0, 4.0, 0.0, 2.0, -7.0]), pairs)
    torch.testing.assert_close(lengths, torch.tensor([5.0, 5.0, 2.0, 2.0, 7.0]))


# --- rounds by hand, in float64 ------------------------------------------------------------------


def as_pairs(vector: Tensor, position: int) -> list[complex]:
    """Llama's rotary pairs (f, f + D/2) of a vector, turned back by its position."""
    half = len(vector) // 2
    turn = [cmath.exp(-1j * position * 10000.0 ** (-f / half)) for f in range(half)]
    return [complex(vector[f], vector[f + half]) * turn[f] for f in range(half)]


def series(query: list[list[complex]], keys: list[tuple[int, list[complex]]], seen: int) -> Tensor:
    """The series over distances 1, 2, 4, 8 of each key, and the norms."""
    half, scores = len(query[0]), []
    centre = [sum(q[f] for q in query) / len(query) for f in range(half)]
    lengths = [sum(abs(q[f]) for q in query) / len(query) for f in range(half)]
    for at, key in keys:
        total = 0.0
        for f in range(half):
            phase = cmath.phase(centre[f] * key[f].conjugate())
            for distance in (1, 2, 4, 8):
                angle = 10000.0 ** (-f / half) * (seen - at + distance) + phase
                total += abs(centre[f]) * abs(key[f]) * math.cos(angle) / 4
            total += (lengths[f] - abs(centre[f])) * abs(key[f])
        scores.append(total)
    return torch.tensor(scores, dtype=torch.float64)


def note_queries(layer: Layer, running: bool) -> None:
    """Adds the newest forward's queries before RoPE; those of the answer if `running`."""
    first = not hasattr(layer, "before")
    if first or running:
        at = range(layer.seen - layer.query.shape[1], layer.seen)
        new = [
            [as_pairs(q, p) for q, p in zip(head, at, strict=True)] for head in layer.query.tolist()
        ]
        layer.before = new if first else [a + b for a, b in zip(layer.before, new, strict=True)]


def proposed_and_ranked(rows: list[Tensor]) -> list[int]:
    """As released: each head proposes its best, the union is ranked by the highest score of any."""
    highest = [max(float(row[i]) for row in rows) for i in range(len(rows[0]))]
    union = sorted({i for row in rows for i in best(row, SMALL)})
    return [union[place] for place in best([highest[i] for i in union], SMALL)]


def rounds(prompt: str, normalize: bool, group: str, scope: str = "head"):
    """What loops leave of each head: the best entries, beside or with those of the prompt."""

    def round_of(one: ByHand) -> None:
        kept: list[tuple[Head, list[int], Tensor, list[Tensor]]] = []
        for layer in one.layers:
            for head, entries in enumerate(layer.heads):
                began = layer.prompt if prompt == "kept" else 0
                beside = [i for i, at in enumerate(entries.positions) if at < began]
                open_ = range(len(beside), len(entries))
                if (one.seen == layer.prompt and prompt == "kept") or len(open_) <= SMALL:
                    continue
                keys = [
                    (at, as_pairs(key, at))
                    for at, key in zip(entries.positions, entries.keys.tolist(), strict=True)
                ][len(beside) :]
                per_group = len(layer.before) // len(layer.heads)
                rows = [
                    series(layer.before[q], keys, one.seen)
                    for q in range(head * per_group, (head + 1) * per_group)
                ]
                if normalize:
                    rows = [(row - row.mean()) / row.std(correction=0) for row in rows]
                of_group = torch.stack(rows)
                scores = of_group.amax(0) if group == "max" else of_group.mean(0)
                kept.append((entries, beside, scores, rows))
        of_all = [row for *_, rows in kept for row in rows]
        for entries, beside, scores, _ in kept:
            chosen = proposed_and_ranked(of_all) if scope == "model" else best(scores, SMALL)
            entries.keep(beside + [len(beside) + i for i in chosen])

    return round_of


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("centre=running", {"running": True}),
        ("prompt=kept", {"prompt": "kept"}),
        ("group=mean,normalize=false", {"group": "mean", "normalize": False}),
        ("scope=model", {"scope": "model"}),
        ("scope=model,prompt=kept", {"scope": "model", "prompt": "kept"}),
    ],
)
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_by_hand(options, changed, lengths):
    changed = {"running": False, "prompt": "counted", "normalize": True, "group": "max"} | changed
    by_rule = rounds(
        changed["prompt"], changed["normalize"], changed["group"], changed.get("scope", "head")
    )

    def before_each_step(one: ByHand) -> None:
        for layer in one.layers:
            layer.prompt = getattr(layer, "prompt", one.seen)
            layer.seen = one.seen
            note_queries(layer, changed["running"])

    own = [option for option in options.split(",") if option and not option.startswith("prompt")]
    spec = f"triattention:{','.join(['offsets=8', *own])} + every:interval=3"
    spec += f",prompt={changed['prompt']}"
    steps = 30 if changed["prompt"] == "kept" else 12
    assert_each_round(spec, by_rule, lengths, 3, before_each_step, steps)


def centres_of(model: Any, folder: Path) -> tuple[str, Centres]:
    """A file of random centres of the model, as an option, and what it holds."""
    config, draw = model.config, torch.Generator().manual_seed(0)
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    shape = config.num_hidden_layers, heads, config.num_attention_heads // heads, size
    centres = torch.randn(shape, generator=draw)
    lengths = torch.complex(*centres.chunk(2, -1)).abs().repeat(1, 1, 1, 2) * 1.5
    fitted, path = Centres(centres, lengths), folder / "centres.safetensors"
    write_fitted(path, fitted, model, written_by="", target="triattention", texts=0)
    return f"file={path}", fitted


@pytest.mark.parametrize("name", ["triattention", "triattention_official"])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_by_the_centres_of_a_file(tmp_path, name, lengths):
    """Queries c + i·d and c − i·d have the centre c; each of their pairs is 1.5 times as long."""
    option, fitted = centres_of(model_with(2, "kvfold"), tmp_path)

    def before_each_step(one: ByHand) -> None:
        for index, layer in enumerate(one.layers):
            layer.prompt = getattr(layer, "prompt", one.seen)
            layer.seen = one.seen
            c = torch.complex(*fitted.centres[index].flatten(0, 1).double().chunk(2, -1))
            both = c * complex(1, 1.25**0.5), c * complex(1, -(1.25**0.5))
            layer.before = [[one.tolist() for one in pair] for pair in zip(*both, strict=True)]

    spec = f"{name}:offsets=8,{option} + every:interval=3,prompt=counted"
    scope = "model" if name.endswith("official") else "head"
    assert_each_round(spec, rounds("counted", True, "max", scope), lengths, 3, before_each_step)


def test_the_centres_of_a_file_are_read_by_policies_too(tmp_path):
    option, _ = centres_of(build("llama"), tmp_path)
    made = policy(f"triattention:{option},prompt=counted")
    assert made.needs.queries == 0 and policy("triattention:prompt=counted").needs.queries == "all"


def test_centres_of_others_and_running_ones_of_a_file_are_refused(tmp_path):
    model = build("llama")
    option, _ = centres_of(model, tmp_path)
    kvfold.CompressedCache(model, f"triattention:{option}", SMALL)
    with pytest.raises(ScorerFileError, match=r"other weights.*--scorer triattention"):
        kvfold.CompressedCache(build("llama", seed=1), f"triattention:{option}", SMALL)
    with pytest.raises(KvfoldError, match="do not run along"):
        kvfold.parse(f"triattention:{option},centre=running")


def test_the_official_preset_keeps_one_set():
    assert kvfold.parse("triattention_official") == kvfold.parse("triattention:scope=model")


def test_running_centres_where_the_first_round_comes_early():
    """Rounds after 18 and 21 tokens of the text, whose prompt has 17."""
    by_rule = rounds("counted", True, "max")

    def before_each_step(one: ByHand) -> None:
        for layer in one.layers:
            layer.prompt, layer.seen = 17, one.seen
            note_queries(layer, running=True)

    def where_due(one: ByHand) -> None:
        if one.seen % 3 == 0:
            by_rule(one)

    spec = "triattention:offsets=8,centre=running + every:interval=3,phase=absolute"
    assert_each_round(spec, where_due, (17,), 1, before_each_step)


def test_one_set_for_the_model_is_of_one_size():
    for other in ("pyramidkv", "adakv"):
        with pytest.raises(IllegalComposition):
            kvfold.parse(f"triattention:scope=model + {other}").stages()
    assert kvfold.parse("triattention").by_head
    assert not kvfold.parse("triattention:scope=model").by_head


@pytest.mark.slow
def test_one_set_for_the_model_divides_a_budget_in_bytes_evenly():
    spec = "triattention_official:prompt=counted + every:interval=4"
    reader = start(build("llama"), spec, (64,), budget="20KB")
    for _ in range(3):
        decode(reader, 5)
        (only,) = {tuple(head) for layer in positions(reader.cache) for head in layer[0]}
        assert len(only) < 64


def test_rounds_are_every_128_tokens_beside_the_prompt():
    stages = kvfold.parse("triattention").stages()
    assert stages.when == Rounds(128, "kept")
    reader = start(build("llama"), "triattention", (30,), budget=10)
    assert kept(reader.cache) == [30]


def test_frequencies_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel, match="changes its rotary frequencies"):
        kvfold.CompressedCache(build("llama", rope_parameters=rope), "triattention", SMALL)


def test_models_without_rope_are_scored_by_the_centre_alone():
    reader = start(build("gpt2"), "triattention:prompt=counted + every:interval=3", budget=SMALL)
    decode(reader, 9)
    assert kept(reader.cache) == [SMALL]


@pytest.mark.parametrize("offsets", [0, -1, 2**20 + 1])
def test_offsets_out_of_range_are_refused(offsets):
    with pytest.raises(KvfoldError, match="offsets is from 1"):
        TriAttention(offsets=offsets)
