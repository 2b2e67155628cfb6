# SPDX-License-Identifier: Apache-2.0
"""Writing of contexts to files: `Context.save`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as as_bytes
from safetensors.torch import save_file
from torch import Tensor

import kvfold
from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_trial import entry_shapes
from kvfold.contexts.document import CompressedDocument
from kvfold.contexts.files import layers
from kvfold.contexts.files import stock_layers as others
from kvfold.contexts.files.coding import Coding
from kvfold.contexts.files.format import check_context_place, merged_over_ranks, metadata
from kvfold.contexts.files.header import (
    BudgetHeader,
    Header,
    LayerHeader,
    SessionHeader,
    StockLayerHeader,
    TextHeader,
)
from kvfold.errors import CodecRefusal, KvfoldError
from kvfold.hf.header import ModelHeader, RopeHeader, digest_of, order_metadata
from kvfold.hf.identity import model_header, rope_header
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.views import Named
from kvfold.methods.base import Method, is_registered, origins, parse, spelled_out
from kvfold.methods.stages.when import Once
from kvfold.store.per_token import Quantizing
from kvfold.store.quantized import Packing
from kvfold.writing import replacing


class FileTensors:
    """Tensors of a file by name, on the CPU; shared storage is stored once.

    `heads` are the KV heads that this rank holds; None: all.
    """

    def __init__(self, heads: slice | None) -> None:
        self.first_head: int = 0 if heads is None else heads.start
        self.stored: dict[str, Tensor] = {}
        self.same_as: dict[str, str] = {}
        # Keeps the tensors alive, so that no address is reused.
        self._at: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}

    def add(self, prefix: str, by_head: Named, whole: dict[str, Tensor]) -> None:
        """Adds tensors per KV head and tensors of all heads, under a prefix."""
        for name, of_heads in by_head.items():
            for head, tensor in enumerate(of_heads, self.first_head):
                self._add(f"{prefix}{name}.{head}", tensor)
        for name, tensor in whole.items():
            self._add(f"{prefix}{name}", tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        place = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in self._at:
            self.same_as[name] = self._at[place][0]
            return
        self._at[place] = name, tensor
        self.stored[name] = tensor.detach().contiguous().cpu()

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a view would include its whole storage.
        return {"stored": as_bytes(self.stored), "same_as": self.same_as}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.stored, self.same_as = from_bytes(state["stored"]), state["same_as"]


@dataclass(frozen=True)
class RankPart:
    """A tensor-parallel rank's part of a file: headers of its layers, and tensors."""

    headers: list[LayerHeader | StockLayerHeader]
    tensors: FileTensors


@full_precision
def save(
    context: CompressedDocument,
    path: str | Path,
    session: SessionHeader | None = None,
    codec: str | None = None,
    text: TextHeader | None = None,
) -> None:
    """Writes `context` to `path` atomically; `session` if it is a session's.

    `codec` is one of `codecs/codec.py`; None: tensors as they are. `text` is a server's key.

    A process killed meanwhile leaves the old file intact, and a file `.kvfold-<random>.tmp`. Under
    tensor parallelism all ranks call this, and the first one writes the entries of all. Raises
    KvfoldError if the cache is empty, in the middle of a turn, has several rows, or its method is
    not registered; if the model has changed since it was read; for a codec that cannot be; and if
    the file cannot be written or is there, and no context file.
    """
    cache = context.cache
    _check(cache)
    if codec is not None:
        check_packable(cache.method)
    check_context_place(Path(path))  # before the tensors are copied
    cache.binding.check_model()  # the identities below are those of the time when it was read
    context.check()
    tensors = FileTensors(cache.ranks.own_heads)
    headers = list(_layers(cache, tensors))
    rope, frequencies = rope_header(context.model)
    whole = {"ids": context.ids[0].int()}
    if cache.phase.prefix is not None:
        whole["prefix"] = cache.phase.prefix
    tensors.add("", {}, whole)
    tensors.add("rope.", {}, frequencies)
    model = model_header(context.model, context.tokenizer)
    write = partial(_write, context, Path(path), model, rope, session, codec, text)
    cache.ranks.on_first(RankPart(headers, tensors), write)


def _write(
    context: CompressedDocument,
    path: Path,
    model: ModelHeader,
    rope: RopeHeader,
    session: SessionHeader | None,
    codec: str | None,
    text: TextHeader | None,
    by_rank: list[RankPart],
) -> None:
    """Writes the parts of all ranks, `by_rank` in rank order."""
    cache, limit = context.cache, context.cache.budget
    stored = {name: t for share in by_rank for name, t in share.tensors.stored.items()}
    headers = [
        merged_over_ranks(of_ranks) for of_ranks in zip(*(s.headers for s in by_rank), strict=True)
    ]
    same_as = {name: other for s in by_rank for name, other in s.tensors.same_as.items()}
    coded = None
    if codec is not None:
        coding = Coding.of(codec, context.model)  # other ranks may lack its file
        if coding.basis is not None:
            coding.basis.check_entries(entry_shapes(context.model) or ())
        stored, same_as, coded = coding.encode(cache, stored, same_as, headers)
    header = Header(
        written_by=kvfold.__version__,
        method=spelled_out(cache.method),
        budget=None if limit is None else BudgetHeader(kind=limit.kind, amount=limit.amount),
        protect=list(cache.protect),
        seed=cache.seed,
        per_chunk=cache.per_chunk,
        seen=cache.get_seq_length(),
        dtype=str(cache.compressed_layers[0].dtype).removeprefix("torch."),
        bits=_bits(cache),
        before=context.frame.before,
        after=context.frame.after,
        between=context.frame.between,
        model=model,
        rope=rope,
        has_prefix=cache.phase.prefix is not None,
        layers=[header for header in headers if isinstance(header, LayerHeader)],
        others=[header for header in headers if isinstance(header, StockLayerHeader)],
        same_as=same_as,
        checksums={name: digest_of(tensor) for name, tensor in stored.items()},
        origins=origins(cache.method),
        session=session,
        codec=coded,
        level=context.level,
        fits=cache.fits.digests,
        text=text,
        answered=context.frame.answered,
        system=context.frame.system,
        arguments=dict(context.frame.arguments),
    )
    with replacing(path) as temporary:
        save_file(stored, temporary, metadata(header))
        order_metadata(temporary)


def check_packable(method: Method) -> None:
    """Raises CodecRefusal for a method whose entries are read from their file one by one."""
    encode = method.stages().encode
    if encode is not None and encode.recalls:
        raise CodecRefusal(
            "entries of recall are read from their file one by one, and a codec packs them "
            "together: leave out codec= (--codec)"
        )


def _check(cache: CompressedCache) -> None:
    """Raises KvfoldError for a cache that cannot be saved; see `save`."""
    states, phase = cache.states, cache.phase
    if any(state.store is None for state in states):
        raise KvfoldError("there is nothing to save: the cache has read nothing yet")
    once = isinstance(cache.method.stages().when, Once)
    late = once and any(state.next_round is not None for state in states)
    in_prefill = phase.frozen or phase.in_prefill(cache.get_seq_length())
    if in_prefill or late or cache.binding.waiting:
        raise KvfoldError("the cache is in the middle of a turn: save it when the turn has ended")
    if any(len(state.stored().keys) != 1 for state in states):
        raise KvfoldError("a context file holds one document, and this cache has several rows")
    named = is_registered(cache.method)
    if not named or parse(spelled_out(cache.method)) != cache.method:
        raise KvfoldError(
            f"{cache.method} is not a registered method, so no file could be loaded again: "
            "decorate its class with @kvfold.register(name)"
        )


def _layers(
    cache: CompressedCache, tensors: FileTensors
) -> Iterator[LayerHeader | StockLayerHeader]:
    """The header of each layer in turn, whose tensors are added to `tensors`."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            saved = layers.describe(layer, index)
            tensors.add(f"layers.{index}.", saved.by_head, saved.whole)
            yield saved.header
        else:
            header, by_head, whole = others.describe(layer, index)
            tensors.add(f"others.{index}.", by_head, whole)
            yield header


def _bits(cache: CompressedCache) -> tuple[int, int] | None:
    encode = cache.method.stages().encode
    if isinstance(encode, Packing | Quantizing):
        return encode.key_bits, encode.value_bits
    return None
