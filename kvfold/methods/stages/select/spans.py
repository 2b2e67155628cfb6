# SPDX-License-Identifier: Apache-2.0
"""Selection by spans: each span of tokens keeps its share, the best by score inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import largest_remainder
from kvfold.methods.stages.select.top import top, with_forced


def best_of_spans(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    spans: Sequence[tuple[int, int]],
) -> Tensor:
    """Slots `[B, H, K]` of each span's share; the tokens outside all of them are one span more.

    scores, forced and positions `[B, H, T]`; counts `[B, H]`, forced entries included, which count
    for their span. Ascending, −1 for holes. Raises KvfoldError without spans.
    """
    if not spans:
        raise KvfoldError("fair takes the spans to be fair to: fair:spans=START/STOP/…")
    of_spans = [(positions >= start) & (positions < stop) for start, stop in spans]
    members = torch.stack(of_spans, -1)
    outside = (positions >= 0) & ~members.any(-1)
    members = torch.cat([members, outside[..., None]], -1)
    stored, always = members.sum(2).tolist(), (members & forced[..., None]).sum(2).tolist()
    shares = torch.tensor(
        [
            [quotas(*head) for head in zip(*row, strict=True)]
            for row in zip(counts.tolist(), stored, always, strict=True)
        ],
        device=scores.device,
    )
    ranked = with_forced(scores, forced, positions)
    # Each entry's rank inside its span says whether it is among the span's share.
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    sorted_members = members.gather(2, order[..., None].expand_as(members))
    inside = sorted_members & (sorted_members.cumsum(2) <= shares[:, :, None])
    kept = torch.zeros_like(forced).scatter(2, order, inside.any(-1))
    return top(kept.float(), kept.sum(-1))


def quotas(total: int, stored: Sequence[int], least: Sequence[int]) -> list[int]:
    """Entries of each span, by the largest remainder of `total · stored / Σ stored`.

    No span gets fewer than its `least`, nor more than it has; of equal remainders the earlier span
    is first.
    """
    fixed: dict[int, int] = {}
    while True:
        open_ = [span for span in range(len(stored)) if span not in fixed]
        room, everything = total - sum(fixed.values()), sum(stored[span] for span in open_)
        exact = [room * stored[span] / max(1, everything) for span in open_]
        shares = dict(zip(open_, largest_remainder(exact, room), strict=True))
        short = {span: least[span] for span in open_ if shares[span] < least[span]}
        if not short:
            return [(fixed | shares)[span] for span in range(len(stored))]
        fixed |= short
