# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_centres`: where each head's queries lie before RoPE, for `triattention`."""

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
from kvfold.kernels.mean_rotation import pair_norms, rotary_pairs
from kvfold.methods.stages.score.distant_queries import Centres


@dataclass(frozen=True)
class CentreFit(Fit):
    """Fitted centres: their file, and how tightly queries lie around them.

    `concentration[l][q]` is R of each query head: the length of its mean query over the mean length
    of its queries, rotary pair by rotary pair, mean over the pairs. It is 1 where all queries are
    alike, and small where they point everywhere.
    """

    concentration: list[list[float]]

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        heads = [head for layer in self.concentration for head in layer]
        return (
            f"length of the centres over that of the queries, R: mean over heads "
            f"{sum(heads) / len(heads):.3f}, lowest {min(heads):.3f}"
        )


@checked_arguments
def fit_centres(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    note: Callable[[str], None] = lambda line: None,
) -> CentreFit:
    """Fits the centres of `triattention:file=…`, two vectors for each layer and query head.

    A centre is the mean query before RoPE, over all tokens of all texts; beside it the mean length
    of each rotary pair. Each text is read once, and then gone. `note` is called with a line of
    progress after each.

    Raises KvfoldError for no text, for a text of less than 64 tokens or beyond the model's trained
    length, and if no file can be written to `out`; UnsupportedModel for a model that caches
    latents, or whose keys cannot be rotated back.
    Source: WeianMao/triattention, the calibration of `pruning_utils.py`.
    """
    check_inputs(model, tokenizer, texts, 1, out)
    sums, tokens = torch.zeros(()), 0
    for text in noted(texts, note):
        read = list(layers_read(model, tokenizer, text))
        sums = sums + torch.stack([_sums(layer) for layer in read])
        tokens += read[0].queries.shape[1]
    heads = read[0].keys.shape[0]
    centres, lengths = (sums / tokens).float().unflatten(2, (heads, -1)).unbind(1)
    fitted = Centres(centres.contiguous(), lengths.contiguous())
    pairs = _pairs(read[0]).cpu()
    share = pair_norms(centres, pairs) / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
    measured = {"concentration": share.mean(-1).flatten(1).tolist()}
    return CentreFit.written(out, fitted, model, texts, Centres.method, measured)


def _sums(layer: LayerRead) -> Tensor:
    """Sums over queries before RoPE `[2, Hq, D]`, float64: of them, and of their pairs' lengths."""
    before = layer.unrotated(layer.queries).double()
    lengths = pair_norms(before, _pairs(layer).double())
    return torch.stack([before.sum(1), lengths.sum(1)]).cpu()


def _pairs(layer: LayerRead) -> Tensor:
    return rotary_pairs(layer.rotation, layer.keys.shape[-1], layer.keys.device)
