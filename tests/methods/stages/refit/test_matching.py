# SPDX-License-Identifier: Apache-2.0
"""Attention matching beside hand-computed numbers and attention written out."""

from __future__ import annotations

from dataclasses import replace
from math import e

import pytest
import torch
from torch import Tensor

from kvfold.kernels.column_maxima import attend_with_column_maxima
from kvfold.kernels.partial_attention import PartOutput, attend_to_part, largest_logits
from kvfold.methods.stages.refit.base import Compaction, References
from kvfold.methods.stages.refit.matching import Matching, Queries

PUBLISHED = Matching("block", "entry", fit_values=True, ridge=0.0, hold=0.0)
WHOLE = Matching("whole", "entry", fit_values=True, ridge=1e-3, hold=1e-3)


def base(a: int, b: int, c: int, modulus: int, minus: int, over: int, rows: int = 8) -> Tensor:
    """Numbers `((a·i + b·j + c·i·j) mod modulus − minus) / over`, `[8, 4]`."""
    i, j = torch.arange(rows)[:, None], torch.arange(4)
    return (((a * i + b * j + c * i * j) % modulus) - minus).double() / over


KEYS, VALUES = base(7, 3, 1, 11, 5, 4), base(5, 2, 4, 7, 3, 2)
QUERIES = base(4, 5, 2, 9, 4, 4)
KEPT = torch.tensor([5, 6, 2])


@pytest.fixture
def golden() -> Queries:
    """Eight keys of one head, eight queries, and nothing else in view."""
    block = attend_to_part(QUERIES[None], KEYS[None], VALUES[None], scale=0.5)
    nothing = PartOutput(torch.zeros_like(block.out), torch.full_like(block.mass, -torch.inf))
    logits = (QUERIES @ KEYS[KEPT].T * 0.5)[None]
    return Queries.of(logits, block, nothing, largest_logits(QUERIES, KEYS, scale=0.5)[None])


def test_biases_are_those_of_non_negative_least_squares(golden):
    bias = PUBLISHED.biases(golden, torch.ones(1, 3, dtype=torch.bool))[0].double()
    weights = bias.exp()
    expected = torch.tensor([0.0, 3.504028, 4.094251]).double()
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    scaled = (golden.logits[0] - golden.largest[0, :, None]).exp()
    mass = (golden.block.mass - golden.largest)[0].exp()
    assert float((scaled @ weights - mass).square().sum()) == pytest.approx(3.301085, abs=1e-5)


def test_keys_of_highest_attention_are_those_computed_by_hand():
    everything = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    query, key, value = (each[None, None] for each in (QUERIES, KEYS, VALUES))
    scored = everything[0, :, 0]
    options = {"scale": 0.5, "scored": scored, "rms": True}
    _, rms = attend_with_column_maxima(query, key, value, everything, **options)
    expected = [0.136458, 0.121252, 0.136786, 0.125746, 0.129136, 0.167189, 0.140199, 0.121100]
    torch.testing.assert_close(rms[0, 0], torch.tensor(expected).double(), rtol=0, atol=1e-6)
    assert torch.equal(rms[0, 0].topk(3).indices, KEPT)


def test_true_non_negative_weights_err_less_than_the_published_clamped_ones(golden):
    scaled = (golden.logits[0] - golden.largest[0, :, None]).exp()
    mass = (golden.block.mass - golden.largest)[0].exp()
    clamped = torch.linalg.lstsq(scaled, mass[:, None]).solution[:, 0].clamp(e**-3, e**3)
    expected = torch.tensor([0.049787, 3.739806, 4.310226]).double()
    torch.testing.assert_close(clamped, expected, rtol=0, atol=1e-5)
    published = float((scaled @ clamped - mass).square().sum())
    assert published == pytest.approx(4.122851, abs=1e-5)
    own = PUBLISHED.biases(golden, torch.ones(1, 3, dtype=torch.bool))[0].exp()
    assert float((scaled @ own - mass).square().sum()) < published


def test_values_are_those_of_least_squares(golden):
    bias = torch.tensor([-3, 1.319034, 1.460990]).double()
    kept, bound = VALUES[KEPT][None], torch.tensor([torch.inf])
    made, guarded = PUBLISHED.values(golden, kept, bias[None], bound)
    expected = [
        [8.793864, 28.940579, 47.413433, -14.687487],
        [0.051364, -0.612303, -0.289257, -0.004918],
        [-0.497786, 0.090825, -0.156896, 0.490729],
    ]
    torch.testing.assert_close(made[0].float(), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert guarded == 0
    made, guarded = PUBLISHED.values(golden, kept, bias[None], 4 * VALUES.norm(dim=-1).max()[None])
    assert guarded == 1
    assert float(made.norm(dim=-1).max()) <= 4 * float(VALUES.norm(dim=-1).max())


def relative(golden: Queries, values: Tensor, bias: Tensor) -> float:
    return float((golden.wrong(values, bias) / golden.block.out.square().sum()).sqrt())


def test_errors_of_the_output_are_those_computed_by_hand(golden):
    kept, nothing, bound = VALUES[KEPT][None], torch.zeros(1, 3), torch.tensor([torch.inf])
    clamped = torch.tensor([[-3, 1.319034, 1.460990]])
    assert relative(golden, kept, nothing) == pytest.approx(2.308715, abs=1e-5)
    assert relative(golden, kept, clamped) == pytest.approx(1.813737, abs=1e-5)
    made = PUBLISHED.values(golden, kept, clamped, bound)[0].double()
    assert relative(golden, made, clamped) == pytest.approx(0.321389, abs=1e-5)
    for ridge, expected in ((0.0, 0.336947), (1e-3, 0.337242), (1e-2, 0.358977)):
        made = replace(PUBLISHED, ridge=ridge).values(golden, kept, nothing, bound)[0].double()
        assert relative(golden, made, nothing) == pytest.approx(expected, abs=2e-5)
    expected = torch.tensor([0.065677, 0.591786, 1.067562, -0.296999])
    torch.testing.assert_close(made[0, 0].float(), expected, rtol=1e-4, atol=1e-4)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compaction(
    kept: int = 12, stored: int = 40, queries: int = 128, **changes: object
) -> Compaction:
    """Two rows of two heads; the last row has ten entries of padding and fewer queries."""
    keys, values = noise(2, 2, stored, 8, seed=1), noise(2, 2, stored, 6, seed=2)
    positions = torch.arange(stored).expand(2, 2, -1).clone()
    positions[1] -= 10
    real = torch.ones(2, queries, dtype=torch.bool)
    real[1, : queries // 4] = False
    rest = PartOutput(noise(2, 2, queries, 6, seed=4), noise(2, 2, queries, seed=5))
    references = References(2 * noise(2, 2, queries, 8, seed=3), rest, real, groups=2)
    scores = noise(2, 2, stored, seed=6).masked_fill(positions < 0, -torch.inf)
    slots = scores.topk(kept).indices.sort(-1).values
    given = Compaction(keys, values, None, positions >= 0, slots, references, scale=0.35)
    return replace(given, **changes)


def outputs(given: Compaction, values: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[B, H, n, Dv]` over kept entries and the rest, as one softmax."""
    real = (given.slots >= 0)[..., None, :]
    slots = given.slots.clamp(min=0)[..., None]
    keys = given.keys.gather(2, slots.expand(-1, -1, -1, given.keys.shape[-1]))
    logits = given.references.queries @ keys.transpose(-1, -2) * given.scale
    if given.softcap is not None:
        logits = given.softcap * (logits / given.softcap).tanh()
    if bias is not None:
        logits = logits + bias[:, :, None]
    logits = logits.masked_fill(~real, -torch.inf)
    both = torch.cat([logits, given.references.rest.mass[..., None]], -1).softmax(-1)
    return both[..., :-1] @ values + both[..., -1:] * given.references.rest.out


def kept_values(given: Compaction) -> Tensor:
    slots = given.slots.clamp(min=0)[..., None].expand(-1, -1, -1, given.values.shape[-1])
    return given.values.gather(2, slots)


def errors(given: Compaction, values: Tensor, bias: Tensor | None, judges: bool) -> list[float]:
    """Relative errors of each row, over held-out queries or over those of the fit."""
    stored = given.keys.shape[2]
    everything = torch.arange(stored).expand(2, 2, -1).masked_fill(~given.block, -1)
    whole = replace(given, slots=everything)
    true, got = outputs(whole, given.values, given.bias), outputs(given, values, bias)
    found = []
    for row, real in enumerate(given.references.real):
        token = (real.cumsum(0) - 1) // given.references.groups
        rows = real & ((token % 8 == 7) == judges)
        wrong = (got - true)[row][:, rows].square().sum()
        found.append(float((wrong / true[row][:, rows].square().sum()).sqrt()))
    return found


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", ["entry", "head", "none"])
def test_the_fit_is_closer_than_eviction_and_its_report_is_true(bias, softcap):
    given = compaction(softcap=softcap)
    made = replace(WHOLE, bias=bias)(given)
    before = errors(given, kept_values(given), None, judges=True)
    after = errors(given, made.values, made.bias, judges=True)
    torch.testing.assert_close(made.report[:, 0], torch.tensor(before), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.report[:, 1], torch.tensor(after), rtol=1e-4, atol=1e-6)
    fitted = errors(given, made.values, made.bias, judges=False)
    plain = errors(given, kept_values(given), None, judges=False)
    assert all(now < then for now, then in zip(fitted, plain, strict=True))
    assert (made.bias is None) == (bias == "none")


def test_a_second_fit_starts_from_the_biases_that_are_there():
    given = compaction()
    biased = replace(given, bias=noise(2, 2, 40, seed=8))
    old = biased.bias.gather(2, given.slots.clamp(min=0))
    made = WHOLE(biased)
    before = errors(biased, kept_values(given), old, judges=True)
    after = errors(biased, made.values, made.bias, judges=True)
    torch.testing.assert_close(made.report[:, 0], torch.tensor(before), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.report[:, 1], torch.tensor(after), rtol=1e-4, atol=1e-6)
    fitted = errors(biased, made.values, made.bias, judges=False)
    unfitted = errors(biased, kept_values(given), old, judges=False)
    assert all(now < then for now, then in zip(fitted, unfitted, strict=True))


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("bias", ["entry", "head", "none"])
@pytest.mark.parametrize("target", ["whole", "block"])
def test_heads_are_fitted_together_as_each_alone(target, bias, values):
    """Heads keep 1 to 12 entries, and one none; the last entries of a row are not of the block."""
    keys, entries = noise(2, 6, 40, 8, seed=1), noise(2, 6, 40, 6, seed=2)
    given = compaction(keys=keys, values=entries, bias=noise(2, 6, 40, seed=9))
    rest = PartOutput(noise(2, 6, 128, 6, seed=4), noise(2, 6, 128, seed=5))
    queries = 2 * noise(2, 6, 128, 8, seed=3)
    references = References(queries, rest, given.references.real, groups=2)
    slots = noise(2, 6, 40, seed=6).topk(12).indices.sort(-1).values
    counts = torch.tensor([[12, 1, 0, 5, 7, 12], [6, 6, 6, 12, 3, 2]])
    slots = slots.masked_fill(torch.arange(12) < 12 - counts[..., None], -1)
    block = torch.ones(2, 6, 40, dtype=torch.bool)
    block[0, 3, 20:] = False
    given = replace(given, slots=slots, block=block, references=references)
    refit = Matching(target, bias, values, ridge=1e-3, hold=1e-3)
    together = refit(given)
    for head in range(6):
        own = slice(head, head + 1)
        of_head = replace(
            references,
            queries=references.queries[:, own],
            rest=PartOutput(*(each[:, own] for each in references.rest)),
        )
        made = refit(
            replace(
                given,
                keys=keys[:, own],
                values=entries[:, own],
                bias=given.bias[:, own],
                block=block[:, own],
                slots=slots[:, own],
                references=of_head,
            )
        )
        real = slots[:, own] >= 0
        torch.testing.assert_close(
            together.values[:, own][real], made.values[real], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            together.bias[:, own][real], made.bias[real], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("target", ["whole", "block"])
def test_all_entries_stay_as_they_are(target):
    given = compaction()
    everything = torch.arange(40).expand(2, 2, -1).masked_fill(~given.block, -1)
    given = replace(given, slots=everything)
    made = replace(WHOLE, target=target)(given)
    real = everything >= 0
    assert float(made.bias[real].abs().max()) <= 1e-5
    expected = given.values[real]
    torch.testing.assert_close(made.values[real], expected, rtol=1e-5, atol=1e-5)


def test_heads_that_keep_much_stay_as_they_are_and_count_in_the_report():
    given = compaction()
    slots = given.slots.clone()
    slots[:, 1, 3:] = -1  # the second heads keep 3 entries, the first ones 12 of 40 and of 30
    given = replace(given, slots=slots)
    made, every = replace(WHOLE, up_to=0.2)(given), WHOLE(given)
    assert torch.equal(made.values[:, 0], kept_values(given)[:, 0])
    assert not made.bias[:, 0].any()
    torch.testing.assert_close(made.values[:, 1], every.values[:, 1])
    torch.testing.assert_close(made.bias[:, 1], every.bias[:, 1])
    before = errors(given, kept_values(given), None, judges=True)
    after = errors(given, made.values, made.bias, judges=True)
    torch.testing.assert_close(made.report[:, 0], torch.tensor(before), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.report[:, 1], torch.tensor(after), rtol=1e-4, atol=1e-6)


def test_without_a_fit_it_is_plain_eviction_bit_for_bit():
    given = compaction()
    made = Matching("whole", "none", fit_values=False, ridge=1e-3, hold=1e-3)(given)
    assert made.bias is None
    assert torch.equal(made.values, kept_values(given))
    assert torch.equal(made.report[:, 0], made.report[:, 1])


def test_entries_outside_of_the_block_are_not_touched():
    given = compaction()
    block = given.block.clone()
    block[:, :, :15] = False
    made = WHOLE(replace(given, block=block))
    outside = (given.slots < 15) & (given.slots >= 0)
    assert bool(outside.any()) and bool((~outside).any())
    assert torch.equal(made.values[outside], kept_values(given)[outside])
    assert not made.bias[outside].any()
    assert not torch.equal(made.values[~outside], kept_values(given)[~outside])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_holds_finite_values(dtype):
    given = compaction()
    huge = 6e4 if dtype == torch.float16 else 1e30
    values = (given.values / given.values.abs().max() * huge).to(dtype)
    made = WHOLE(replace(given, keys=given.keys.to(dtype), values=values))
    assert made.values.dtype == dtype
    assert bool(made.values.isfinite().all())
    assert made.bias.dtype == torch.float32


def test_equal_keys_few_references_and_empty_heads_are_no_obstacle():
    given = compaction(queries=16)
    keys = given.keys.clone()
    keys[0] = keys[0, :, :1]
    slots = given.slots.clone()
    slots[0, 0] = -1
    slots[0, 1, :-1] = -1
    made = WHOLE(replace(given, keys=keys, slots=slots))
    assert bool(made.values.isfinite().all()) and bool(made.bias.isfinite().all())
    none = replace(given.references, real=torch.zeros(2, 16, dtype=torch.bool))
    made = WHOLE(replace(given, references=none))
    assert torch.equal(made.values, kept_values(given))
    assert not made.bias.any()
