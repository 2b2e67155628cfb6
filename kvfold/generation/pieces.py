# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut into forwards: pieces of a length, and before padding between tokens."""

from __future__ import annotations

from itertools import pairwise
from numbers import Integral

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.attention.padding import ON_THE_LEFT
from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.hf.recurrent import restarts
from kvfold.hf.stock_layers import has_recurrent
from kvfold.methods.base import Method
from kvfold.methods.stages.when import Once
from kvfold.observers.reconstruction import ContextReconstruction


def piece_of(prefill_chunk: int | None, total: int) -> int:
    """Tokens of a forward: `prefill_chunk`, or all `total`; KvfoldError as `check_chunk`."""
    if prefill_chunk is None:
        return total
    check_chunk(prefill_chunk)
    return prefill_chunk


def check_chunk(tokens: int) -> None:
    """Raises KvfoldError for pieces of no token, or of a part of one."""
    if not isinstance(tokens, Integral) or isinstance(tokens, bool) or tokens < 1:
        raise KvfoldError(f"prefill_chunk is a positive number of tokens, not {tokens}")


def check_per_chunk(method: Method, chunk: int | None) -> int:
    """The length of a piece; KvfoldError without one, or if the method needs the whole prompt."""
    if chunk is None:
        raise KvfoldError("per_chunk needs prefill_chunk= (--prefill-chunk), the length of a piece")
    check_chunk(chunk)
    stages = method.stages()
    reason = None
    if ContextReconstruction in stages.needs:
        reason = "lets the model repeat the whole prompt before it scores any of it"
    elif stages.token_pruning is not None:
        reason = "prunes the prompt between the layers of one forward"
    elif isinstance(stages.when, Once):
        reason = "compresses when the first token is generated"
    if reason is not None:
        raise KvfoldError(f"{method} {reason}: leave out per_chunk")
    return chunk


def piece_ends(start: int, stop: int, chunk: int) -> list[int]:
    """Ends of pieces of at most `chunk` tokens, as equal as possible."""
    pieces = -(-(stop - start) // chunk)
    return [start + (stop - start) * (i + 1) // pieces for i in range(pieces)]


def before_padding(mask: Tensor, seen: int) -> int:
    """End of the columns to read first: those of an answer's last token that padding follows.

    In a forward of several tokens, padding must stand before all of them.
    """
    followed = (mask[:, seen:-1].bool() & ~mask[:, seen + 1 :].bool()).any(0).nonzero()
    return seen + int(followed[-1]) + 1 if seen and len(followed) else seen


def forward_ends(mask: Tensor | None, start: int, stop: int, chunk: int) -> list[int]:
    """Ends of the forwards that read columns `start` to `stop`, of at most `chunk` tokens each."""
    first = start if mask is None else before_padding(mask[:, :stop], start)
    return [*range(start, first, chunk), *range(first, stop, chunk), stop][1:]


def forwards_of(
    model: PreTrainedModel,
    cache: CompressedCache,
    mask: Tensor | None,
    start: int,
    stop: int,
    chunk: int,
) -> list[int]:
    """Ends of the forwards that read columns `start` to `stop`, at most `chunk` at a time.

    Raises KvfoldError for padding where tokens are read one by one, and as `without_lone_columns`
    where layers are recurrent.
    """
    ends = behind_switch(cache, start, stop, forward_ends(mask, start, stop, chunk))
    if mask is None or not has_recurrent(cache.layers):
        return ends
    one_by_one = start or chunk
    if restarts(model) and not bool(mask[:, one_by_one:stop].all()):
        raise KvfoldError(
            f"{type(model).__name__} reads token by token after the first piece, and would not "
            "skip padding there: leave out prefill_chunk="
        )
    return without_lone_columns(ends, mask, start)


def behind_switch(cache: CompressedCache, start: int, stop: int, ends: list[int]) -> list[int]:
    """Ends of pieces of a text that begins anew, the first of them behind where RoPE changes."""
    rope = cache.binding.rope
    switch = 0 if rope is None or start else rope.switch_before(stop)
    return [end for end in ends if end > switch]


def without_lone_columns(ends: list[int], mask: Tensor, start: int) -> list[int]:
    """`ends` of forwards from column `start` on, the last two moved if the last is a lone column.

    For recurrent layers: in a forward of one column they take padding for tokens, and those of
    Nemotron-H compute another function. Raises KvfoldError if padding is left in such a forward.
    """
    if len(ends) > 1 and ends[-1] - ends[-2] == 1 and ends[-2] - [start, *ends][-3] > 2:
        ends = [*ends[:-2], ends[-2] - 1, ends[-1]]
    forwards = pairwise([start, *ends])
    if any(end - begin == 1 and not bool(mask[:, begin].all()) for begin, end in forwards):
        raise KvfoldError(
            "recurrent layers take padding for tokens in a forward of one column: choose a "
            "prefill_chunk of 3 or more, or read each row with a cache of its own"
        )
    return ends


def check_padding(mask: Tensor, seen: int, stop: int, chunk: int, per_chunk: bool = False) -> None:
    """Raises KvfoldError for padding behind tokens, at the end of a row or in one forward.

    `mask [B, N]` is 0 at padding. Columns from `seen` to `stop` are read in forwards of `chunk`
    tokens, or in pieces that are compressed one by one, and those from `stop` on in one forward.
    """
    pieces = [seen, *piece_ends(seen, stop, chunk)] if per_chunk else [seen, stop]
    ends = {end for piece in pairwise(pieces) for end in forward_ends(mask, *piece, chunk)}
    followed = mask[:, seen:-1].bool() & ~mask[:, seen + 1 :].bool()
    stops = (followed.any(0).nonzero()[:, 0] + seen + 1).tolist()
    if not bool(mask[:, -1].all()) or not {*stops} <= ends | {stop}:
        raise KvfoldError(ON_THE_LEFT)
