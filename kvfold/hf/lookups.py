# SPDX-License-Identifier: Apache-2.0
"""The tables that a forward looks up by number: embeddings of tokens, and learned positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.errors import KvfoldError
from kvfold.hf.image_spans import placeholder_tokens


def learned_positions(model: Any) -> int | None:
    """Tokens for which the model has learned positions, a table; None without one."""
    length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = _embeddings(model)
    tables = (m for m in model.get_decoder().children() if isinstance(m, nn.Embedding))
    # OPT's has two rows more.
    found = any(t is not tokens and t.num_embeddings - (length or 0) in (0, 2) for t in tables)
    return length if found else None


def check_tokens(model: Any, ids: Tensor) -> None:
    """Raises KvfoldError for `ids` of tokens that the model has no embedding for."""
    rows = getattr(_embeddings(model), "num_embeddings", None)
    if rows is None or ids.numel() == 0:
        return
    least, most = torch.stack(ids.aminmax()).tolist()  # a GPU is waited for once
    if least >= 0 and most < rows:
        return
    # Some models put images in place of tokens that have no embedding.
    own = torch.tensor(placeholder_tokens(model), device=ids.device, dtype=ids.dtype)
    beyond = ids[((ids < 0) | (ids >= rows)) & ~torch.isin(ids, own)]
    if beyond.numel():
        raise KvfoldError(
            f"token {int(beyond[0])} has no embedding, as {type(model).__name__} has {rows}: use "
            "the model's own tokenizer, or model.resize_token_embeddings(len(tokenizer)) with "
            "weights trained for the new tokens"
        )


def check_answer(model: Any, mask: Tensor, new: int) -> None:
    """Raises KvfoldError if a prompt of `mask [B, N]` and `new` tokens pass learned positions."""
    limit = learned_positions(model)
    if limit is None or mask.shape[1] + new - 1 <= limit:
        return
    tokens = int(mask.sum(-1).max())
    if tokens + new - 1 > limit:  # the last token is not read
        room = limit - tokens + 1
        remedy = f"set max_new_tokens={room} or less" if room > 0 else "shorten the text"
        raise KvfoldError(
            f"{tokens} tokens and an answer of {new} pass the {limit} for which "
            f"{type(model).__name__} has learned positions: {remedy}"
        )


def check_forward(
    model: Any,
    limit: int | None,
    ids: Tensor | None,
    given: dict[str, Any],
    length: Callable[[], int],
) -> None:
    """Raises KvfoldError as above for a forward that reads `ids [B, S]` behind `length()` columns.

    `limit` is that of `learned_positions`, `given` are the arguments by name. The tokens of a
    decode step are not compared, for which a GPU would have to be waited for; nor are lengths in a
    graph, which counts on the device: `check_answer` has looked before.
    """
    if ids is None:
        return
    if ids.shape[1] > 1:
        check_tokens(model, ids)
    if limit is None or torch.compiler.is_compiling():
        return
    columns = length() + ids.shape[1]
    if columns <= limit:
        return
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(positions, Tensor):
        tokens = int(positions.max()) + 1
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = int(mask.sum(-1).max())
    else:
        tokens = columns
    if tokens > limit:
        raise KvfoldError(
            f"the text has {tokens} tokens with its answer, and {type(model).__name__} has learned "
            f"positions for {limit}: shorten the text or set a smaller max_new_tokens"
        )


def _embeddings(model: Any) -> Any:
    """The module that embeds tokens; None where transformers does not find it."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None
