# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_heads`: how far back each KV head looks, for `duo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.fitted.fitting.queries import LayerRead, check_inputs, layers_read, noted
from kvfold.fitted.of_model import Fit
from kvfold.hf.arguments import checked_arguments
from kvfold.kernels.mean_rotation import Rotate
from kvfold.methods.stages.allocate.retrieval import RetrievalScores

LEAST_TEXTS = 2  # one for each half
LENGTH = 500  # positions at which the mean query looks back


@dataclass(frozen=True)
class HeadFit(Fit):
    """Fitted scores of KV heads: their file, and how much they depend on the texts.

    `agreement` is the part of the better half of the heads that every other text and the rest have
    in common.
    """

    agreement: float

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        return f"half of the passages and the others agree on {self.agreement:.1%} of the best half"


@checked_arguments
def fit_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    note: Callable[[str], None] = lambda line: None,
) -> HeadFit:
    """Fits the scores of `duo:file=…`, one number for each layer and KV head.

    A score is the area under the cumulated attention of a text's mean query to its mean key at 500
    positions, the mean over query heads and texts: 0.5 for a head that attends to all positions
    alike, more for one that looks back. `note` is called with a line of progress after each text.

    Raises KvfoldError for fewer than two texts, for a text of less than 64 tokens or beyond the
    model's trained length, and if no file can be written to `out`; UnsupportedModel for a model
    that caches latents, or whose keys cannot be rotated back.
    Source: NVIDIA/kvpress `duo_attention_press.py`, `duo_attention_on_the_fly`.
    """
    check_inputs(model, tokenizer, texts, LEAST_TEXTS, out)
    found = [
        torch.stack([_area(layer) for layer in layers_read(model, tokenizer, text)])
        for text in noted(texts, note)
    ]
    halves = [torch.stack(found[first::2]).mean(0) for first in (0, 1)]
    scores = RetrievalScores(torch.stack(found).mean(0))
    measured = {"agreement": _in_common(*halves)}
    return HeadFit.written(out, scores, model, texts, RetrievalScores.method, measured)


def area(query: Tensor, keys: Tensor, rotate: Rotate, scale: float, length: int) -> Tensor:
    """Area `[Hq]` under the cumulated attention row of a query to one key at all positions.

    Before RoPE, `query [Hq, D]` for the last of `length` positions, `keys [Hq, D]` for each.
    """
    at = torch.arange(length, device=keys.device)[None]
    turned = rotate(keys[None, :, None].expand(-1, -1, length, -1), at)[0]
    last = rotate(query[None, :, None], at[:, -1:])[0]
    logits = (turned @ last.mT).squeeze(-1) * scale
    return logits.softmax(-1).cumsum(-1).mean(-1)


def _area(layer: LayerRead) -> Tensor:
    """Scores `[H]` of one layer, by the means of its queries and keys before RoPE."""
    query, key = (layer.unrotated(each).mean(1) for each in (layer.queries, layer.keys))
    group = len(layer.queries) // len(layer.keys)
    found = area(query, key.repeat_interleave(group, 0), layer.rotation, layer.scale, LENGTH)
    return found.view(-1, group).mean(-1).cpu()


def _in_common(one: Tensor, other: Tensor) -> float:
    """Part of the better half of the heads `[L, H]` that both scores agree on."""
    count = max(1, one.numel() // 2)
    best = [set(each.flatten().topk(count).indices.tolist()) for each in (one, other)]
    return len(best[0] & best[1]) / count
