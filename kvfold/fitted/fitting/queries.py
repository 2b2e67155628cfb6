# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of a text in every layer, for what is fitted without another method's scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.fitted.of_model import check_fit_place
from kvfold.generation.length import too_long
from kvfold.generation.reading import read_on
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import caches_latents
from kvfold.hf.rotation import Rotation

LEAST_TOKENS = 64  # of a text


@dataclass(frozen=True)
class LayerRead:
    """One layer after a text: queries `[Hq, T, D]`, keys `[H, T, D]`, both after RoPE, and values.

    `scale` is that of the layer's logits, `rotation` its RoPE.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    rotation: Rotation

    def unrotated(self, entries: Tensor) -> Tensor:
        """Its queries or keys `[h, T, D]` before RoPE, float32.

        Raises UnsupportedModel where keys cannot be rotated back.
        """
        self.rotation.check_reversible()
        back = -torch.arange(entries.shape[1], device=entries.device)[None]
        return self.rotation(entries[None].float(), back)[0]


def check_inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    least: int,
    out: str | Path,
) -> None:
    """Raises KvfoldError for what would make a fit of `texts` into the file `out` fail later.

    Fewer than `least` texts, one of less than 64 tokens or beyond the model's trained length, and
    an `out` that is a folder or in none, or another kind of file.
    """
    check_fit_place(Path(out))
    if len(texts) < least:
        raise KvfoldError(
            f"{len(texts)} texts are too few to fit a scorer and to check it: give at least {least}"
        )
    before = PromptFrame.of(tokenizer).before
    for number, text in enumerate(texts):
        tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        if tokens < LEAST_TOKENS:
            raise KvfoldError(
                f"text {number} is too short to fit a scorer, {tokens} tokens: give texts of at "
                f"least {LEAST_TOKENS}, better a thousand"
            )
        found = too_long(model, token_ids(tokenizer, before, text).shape[1])
        if found is not None:
            raise KvfoldError(
                f"text {number} is too long to fit a scorer, {found}, the length it was trained "
                "for: give shorter texts, of fewer --words"
            )


def noted(texts: Sequence[str], note: Callable[[str], None]) -> Iterator[str]:
    """The texts in turn; `note` is called with a line of progress after each."""
    for number, text in enumerate(texts, 1):
        yield text
        note(f"{number} of {len(texts)} passages")


@torch.no_grad()
def layers_read(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> Iterator[LayerRead]:
    """The layers that can be compressed, after a text was read as a user's message.

    Raises UnsupportedModel for a model whose cache holds latents, one for all heads.
    """
    if caches_latents(model):
        raise UnsupportedModel(
            f"{type(model).__name__} caches latents, one for all heads, and filters are for heads"
        )
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text).to(model.device)
    tokens = ids.shape[1]
    cache = CompressedCache(model, f"snapkv:window={tokens}", 1.0)  # it observes all queries
    with cache.reading():
        read_on(model, cache, ids)
        for state in cache.states:
            attended = state.observers.window.prompt.attended
            assert attended is not None
            keys, values = state.stored().dense()
            yield LayerRead(
                attended.query[0], keys[0], values[0], attended.logits["scale"], state.plan.rotation
            )
