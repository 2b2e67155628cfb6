# SPDX-License-Identifier: Apache-2.0
"""Limit of a text's length: the length the model was trained for, unless the user allows more."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.hf.lookups import learned_positions
from kvfold.hf.models import trained_length


def check_length(
    model: PreTrainedModel, tokens: int, allow_longer: bool, document: int = 0
) -> None:
    """Raises KvfoldError for more `tokens` than the model was trained on.

    `allow_longer` lets them pass, where the model has positions for them at all, and so does a
    `document` of more tokens, which was read before.
    """
    found = too_long(model, tokens)
    if found is None:
        return
    if learned_positions(model) is not None:
        raise KvfoldError(
            f"the text has {found}, for which it has learned positions: shorten the text"
        )
    if not allow_longer and too_long(model, document) is None:
        raise KvfoldError(
            f"the text has {found}, the length it was trained for, beyond which answers get worse: "
            "shorten the text, or go on with allow_longer=True (--allow-longer)"
        )


def too_long(model: PreTrainedModel, tokens: int) -> str | None:
    """The `tokens` of a text beside the most that the model was trained on; None if not more."""
    most = trained_length(model)
    if most is None or tokens <= most:
        return None
    return f"{tokens} tokens, and {type(model).__name__} reads at most {most}"


def check_prompt(
    model: PreTrainedModel,
    cache: CompressedCache,
    mask: Tensor,
    piece: int | None,
    allow_longer: bool,
) -> None:
    """As `check_length`, for a prompt of `mask [B, N]` that is read as `reach` says."""
    columns = mask.shape[1]
    if columns > (trained_length(model) or columns):
        check_length(model, reach(cache, int(mask.sum(-1).max()), piece), allow_longer)


def reach(cache: CompressedCache, tokens: int, piece: int | None) -> int:
    """Largest distance, in tokens, between a query and an entry of a text of `tokens`.

    The text's length, unless the method re-indexes: kept tokens are then right before the recent
    ones (arXiv 2309.17453, section 3.2). `piece`: tokens after which the cache is compressed each
    time; None: only at the end.
    """
    if cache.method.stages().positions == "original":
        return tokens
    stores = [state.store for state in cache.states]
    stored = max((store.length for store in stores if store is not None), default=0)
    at_once = stored + tokens - cache.get_seq_length()
    if piece is None or cache.budget is None or cache.budget.kind != "tokens":
        return at_once
    return min(at_once, int(cache.budget.amount) + piece)
