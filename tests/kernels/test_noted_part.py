# SPDX-License-Identifier: Apache-2.0
"""A part noted during a pass, beside attention to these entries alone in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels.column_maxima import NotedPart, attend_with_column_maxima

HEADS, SIZE, STORED, NEW = 2, 8, 300, 270  # three blocks of queries, 30 entries before them
SCALE = 0.35


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def parts_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    inside: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Outputs `[B, Hq, S, Dv]` and masses of the entries `inside [B, T]`, and of all others."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in (key, value))
    logits = query @ keys.mT * SCALE
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    found = []
    for of_part, own_sinks in ((inside, None), (~inside, sinks)):
        own = logits.masked_fill(~of_part[:, None, None], -torch.inf)
        if own_sinks is not None:
            extra = own_sinks.view(1, -1, 1, 1).expand(*own.shape[:3], 1)
            own = torch.cat([own, extra], -1)
        weights = own.softmax(-1).nan_to_num(0)[..., : logits.shape[-1]]
        found.append((weights @ values, own.logsumexp(-1)))
    return found


def by_token(x: Tensor) -> Tensor:
    """`[B, Hq, S, …]` as `[B, H, S·G, …]`."""
    return x.unflatten(1, (HEADS, -1)).transpose(2, 3).flatten(2, 3)


@pytest.mark.cases(6)
@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("kind", ["plain", "padded", "softcap", "sinks", "faint"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_parts_are_those_of_a_pass_of_their_own(kind, groups, dtype):
    key, value = (noise(2, HEADS, STORED, SIZE, seed=seed) for seed in (1, 2))
    query = 2 * noise(2, HEADS * groups, NEW, SIZE, seed=3)
    padding = torch.tensor([0, 20 if kind == "padded" else 0])
    starts = padding + torch.tensor([4, 0])
    columns = torch.arange(STORED)
    inside = (columns >= starts[:, None]) & (columns < STORED - NEW)
    if kind == "faint":  # the entry that is looked at first has no weight
        query[..., 0] = 5
        key[:, :, [0, 4]] = torch.tensor([-100.0] + [0.0] * (SIZE - 1)).double()
    visible = torch.ones(NEW, STORED, dtype=torch.bool).tril(STORED - NEW)
    visible = visible & (columns >= padding[:, None])[:, None, None]
    mask = visible if kind == "padded" else None
    softcap = 3.0 if kind == "softcap" else None
    sinks = noise(HEADS * groups, seed=5) if kind == "sinks" else None
    expected = parts_by_hand(query, key, value, visible, inside, softcap, sinks)
    tokens = torch.arange(0, NEW, 2 if groups == 3 else 1)
    noted = NotedPart(
        [slice(start, STORED - NEW) for start in starts.tolist()], tokens.expand(2, -1)
    )
    out, _ = attend_with_column_maxima(
        *(each.to(dtype) for each in (query, key, value)),
        mask,
        scored=torch.ones(2, STORED, dtype=torch.bool),
        part=noted,
        scale=SCALE,
        softcap=softcap,
        sink_logits=None if sinks is None else sinks.to(dtype),
    )
    assert noted.filled
    near = 1e-6 if dtype == torch.float64 else 1e-3
    total = torch.logaddexp(*(masses for _, masses in expected))
    for got, (outs, masses) in zip(noted.of_rows(out), expected, strict=True):
        share = by_token((masses - total)[:, :, tokens]).exp()
        wanted, counts = by_token(masses[:, :, tokens]).to(dtype), share > near
        assert float(counts.double().mean()) > 0.7
        torch.testing.assert_close(got.mass[counts], wanted[counts], rtol=near, atol=near)
        expected_outs = by_token(outs[:, :, tokens]).to(dtype)
        torch.testing.assert_close(got.out[counts], expected_outs[counts], rtol=near, atol=near)
        own = (got.mass - by_token(total[:, :, tokens])).exp()  # what matters little stays little
        assert bool((own[~counts] < 2 * near).all())


def test_half_precision_notes_nothing():
    key, value = (noise(1, HEADS, STORED, SIZE, seed=seed) for seed in (1, 2))
    query = noise(1, HEADS, 20, SIZE, seed=3)
    scored = torch.ones(1, STORED, dtype=torch.bool)
    noted = NotedPart([slice(4, STORED - 20)], torch.arange(20)[None])
    given = (each.bfloat16() for each in (query, key, value))
    attend_with_column_maxima(*given, None, scored=scored, part=noted, scale=SCALE)
    assert not noted.filled
