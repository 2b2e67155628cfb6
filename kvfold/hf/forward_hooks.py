# SPDX-License-Identifier: Apache-2.0
"""Hooks that tell a cache when a forward begins and returns: it may fail after the last attention.

They also give the model the `rope_deltas` of that cache before a forward, and store them after it.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvfold.errors import KvfoldError
from kvfold.hf import rope_deltas
from kvfold.hf.lookups import check_forward, learned_positions
from kvfold.hf.rope_lengths import serialize
from kvfold.hf.versions import CACHE, CACHE_NAMES


class ToldOfForwards(ABC):
    """A cache that is told of the forwards that read into it."""

    rope_deltas: rope_deltas.Deltas | None = None  # of its text; None before that has any
    reads_logits: bool = False  # of all tokens, whatever the caller keeps
    logits_kept: int | Tensor = 0  # by the caller of the forward that runs, as `logits_to_keep`

    def begin_anew(self) -> None:
        """Notes that the text is gone: the next one has deltas of its own."""
        self.rope_deltas = None

    @abstractmethod
    def get_seq_length(self) -> int:
        """Columns read."""

    def tokens_read(self) -> Tensor | None:
        """Bool mask `[B, seen]` of the columns that are no padding; None: all."""
        return None

    @abstractmethod
    def forward_begins(self, ids: Tensor | None, mask: Tensor | None, new: int) -> None:
        """Called before a forward of `new` tokens stores anything; an error here fails it.

        `ids [B, S]` are its inputs, None for embeddings; `mask [B, N]` or `[B, Hq or 1, S, N]` is
        the caller's, of layers with their whole past, None without one.
        """

    def check_prompt(self, ids: Tensor | None, mask: Tensor | None, total: int) -> None:  # noqa: B027
        """Called before `generate` goes on with a prompt of `total` columns; an error fails it.

        `ids [B, N]` are its tokens, None for embeddings, `mask [B, N]` is None for one of ones.
        """

    @abstractmethod
    def forward_returned(self, ids: Tensor | None, logits: Tensor | None) -> None:
        """Called after a forward has returned; `ids [B, S]` are its inputs, None for embeddings.

        `logits [B, S, V]` are its outputs, None for a cache that does not read them.
        """


# Held while a model's attention or its hooks change, and while it is tried out.
preparing = threading.RLock()
_watched: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def watch(model: nn.Module) -> None:
    """Installs the hooks on `model`, once."""
    if model not in _watched:
        names = tuple(inspect.signature(model.forward).parameters)
        own = next((name for name in CACHE_NAMES if name in names), CACHE)
        holders = rope_deltas.holders(model)
        before = partial(_before, names, own, learned_positions(model), holders)
        _watched[model] = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(partial(_after, own, holders), with_kwargs=True),
            *serialize(model),
        ]


def unwatch(model: nn.Module) -> None:
    """Removes the hooks from `model`."""
    for handle in _watched.pop(model, []):
        handle.remove()


def _before(
    names: tuple[str, ...],
    own: str,
    limit: int | None,
    holders: tuple[nn.Module, ...],
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]] | None:
    """Tells the cache that a forward begins; gives the forward what it must be given otherwise.

    `names` are those of its arguments, `own` that of its cache, `limit` that of
    `learned_positions`, `holders` as in `rope_deltas`. Raises KvfoldError for tokens, positions or
    a mask that cannot be.
    """
    renamed = None
    if len(args) > 1 or kwargs.keys() - names:
        renamed = _named(names, own, args, kwargs)
        args, kwargs = renamed or (args, kwargs)
    cache = kwargs.get(own)
    if not isinstance(cache, ToldOfForwards):
        return None
    ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None and (limit is not None or ids.shape[1] > 1):
        check_forward(model, limit, ids, kwargs, cache.get_seq_length)
    if kwargs.get("use_cache") is False:
        raise KvfoldError(
            "use_cache=False has each step read the whole text again, into a cache that holds it: "
            "leave it out, also of the generation configuration"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # by kinds of layers
        mask = mask.get("full_attention")
    given = kwargs.get("inputs_embeds") if ids is None else ids
    if not torch.compiler.is_compiling():
        if mask is not None and given is not None:
            _check_shape(mask, *given.shape[:2])
        elif mask is None and kwargs.get("position_ids") is not None:
            _check_positions(cache, kwargs["position_ids"])
    cache.forward_begins(
        ids, mask if isinstance(mask, Tensor) else None, 0 if given is None else given.shape[1]
    )
    if holders:
        begins = cache.get_seq_length() == 0
        # `generate` computes the deltas of a text that begins before its first forward.
        if not begins or kwargs.get("position_ids") is None:
            rope_deltas.put(holders, None if begins else cache.rope_deltas)
    cache.logits_kept = kwargs.get("logits_to_keep", 0)
    if not cache.reads_logits or "logits_to_keep" not in kwargs:
        return renamed
    return args, kwargs | {"logits_to_keep": 0}


def _named(
    names: tuple[str, ...], own: str, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Arguments by the forward's own names: those by position, or under the cache's other name.

    A forward swallows a cache under a name that it does not have. None for another's cache.
    """
    if len(args) > 1:
        kwargs, args = dict(zip(names, args, strict=False)) | kwargs, ()
    caches = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
    if not any(isinstance(cache, ToldOfForwards) for cache in caches):
        return None
    if len(caches) > 1:
        raise KvfoldError("cache= and past_key_values= are one argument: give one of them")
    others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
    return args, others | {own: caches[0]}


def _check_shape(mask: Any, rows: int, new: int) -> None:
    """Raises KvfoldError for a mask that is none of `rows` rows, by whose columns it is checked."""
    given = type(mask).__name__
    if isinstance(mask, Tensor):
        given = f"{mask.dtype} {list(mask.shape)}"
        whole = mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
        if mask.dim() == 2 and len(mask) == rows:
            return
        if whole and len(mask) in (1, rows) and mask.shape[2] in (1, new):
            return
    raise KvfoldError(
        f"attention_mask is a {given}: give a tensor [{rows}, N] of the cache's columns and the "
        f"new ones, or [{rows}, 1, {new}, N] of bool or floating point"
    )


def _check_positions(cache: ToldOfForwards, places: Any) -> None:
    """Raises KvfoldError for new tokens at positions of those that were read, as if read again.

    Not with a mask, with which positions are the caller's: drafts of a tree share some. A decode
    step's are not compared, for which a GPU would have to be waited for.
    """
    if not isinstance(places, Tensor) or places.dim() != 2 or places.shape[1] < 2:
        return
    if cache.get_seq_length() == 0:
        return
    real = cache.tokens_read()
    first, read = places[:, 0].cpu(), cache.get_seq_length() if real is None else real.sum(-1).cpu()
    if bool((first < read).any()):
        raise KvfoldError(
            f"position_ids begin at {int(first.min())}, and the cache has read "
            f"{int(torch.as_tensor(read).max())} tokens: give the new ones only, at the positions "
            "behind these"
        )


def _after(
    own: str,
    holders: tuple[nn.Module, ...],
    model: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Tells the cache that a forward has returned; gives the caller the logits that it keeps."""
    cache = kwargs.get(own)
    if not isinstance(cache, ToldOfForwards):
        return
    ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
    logits = getattr(output, "logits", None) if cache.reads_logits else None
    cache.forward_returned(ids, logits)
    if cache.reads_logits:
        assert logits is not None  # else the cache refused
        kept = cache.logits_kept
        output.logits = logits[:, slice(-kept, None) if isinstance(kept, int) else kept]
    if holders:
        cache.rope_deltas = rope_deltas.taken(holders)
