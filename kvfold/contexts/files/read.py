# SPDX-License-Identifier: Apache-2.0
"""Loading of contexts from files: `kvfold.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_trial import EntryShape, entry_shapes, other_layers
from kvfold.cache.shrink import is_nested
from kvfold.contexts.context import Context
from kvfold.contexts.files import layers
from kvfold.contexts.files import stock_layers as others
from kvfold.contexts.files.coding import decoded, rotations_of
from kvfold.contexts.files.cold_rows import COLD, SUMS, FileRows
from kvfold.contexts.files.format import ContextFile, opened, told_as_damage
from kvfold.contexts.files.header import Header, LayerHeader, StockLayerHeader
from kvfold.contexts.files.layers import SavedLayer
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.header import model_differences
from kvfold.hf.identity import model_header, rope_header
from kvfold.hf.lookups import check_tokens
from kvfold.hf.models import layer_device
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.views import Named
from kvfold.methods.base import Method, parse, spelled_out
from kvfold.methods.registry import registered
from kvfold.store.ragged import share_pairs


@checked_arguments
def load(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    heads: slice | None = None,
) -> Context:
    """The context saved at `path`; its answers are those of the context that was saved.

    Under tensor parallelism each rank loads its own KV heads. `heads` selects KV heads explicitly,
    for a model sharded by other means than transformers'; its weights are then not compared.
    Raises ContextFileError if the file is damaged, of another version, or made with another model,
    tokenizer, RoPE, dtype or method; and what `CompressedCache` raises.
    """
    with opened(path) as file:
        return read(file, model, tokenizer, heads)


@full_precision
def read(
    file: ContextFile,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: slice | None = None,
) -> Context:
    """The context of an open file; arguments and errors as for `load`."""
    header, limit = file.header, file.header.budget
    _check(file, model, tokenizer, heads)
    method = _method(file)
    cache = CompressedCache(
        model,
        method,
        None if limit is None else Budget(limit.kind, limit.amount),
        tokenizer=tokenizer,
        protect=header.protect,
        seed=header.seed,
        keep_scores=keeps_scores(header, method),
    )
    cache.binding.check_model()
    if file.header.fits and file.header.fits != cache.fits.digests:
        raise ContextFileError(
            f"{file.path} was made with {file.header.method}, and the fitted numbers in its file "
            "have changed since: put back the file that it was made with, or compress the document "
            "again"
        )
    with told_as_damage(file):
        _fill(cache, file, model, heads or cache.ranks.own_heads)
    if header.has_prefix:
        cache.phase.keep_first(_prefix(file).to(model.device, copy=True))
    cache.take(per_chunk=header.per_chunk)
    ids = _ids(file, model)[None].to(model.device)
    cache.phase.note_ids(ids)
    cache.phase.compact()
    cache.binding.put_frame(header.frame)
    return Context(model, tokenizer, cache, header.frame, ids, header.level)


def _prefix(file: ContextFile) -> Tensor:
    """The number of leading tokens `[1]`; raises ContextFileError for more than there are."""
    prefix = file.tensor("prefix")
    if prefix.shape != (1,) or not 0 <= float(prefix) <= file.header.seen:
        raise file.damaged("it has more leading tokens than tokens")
    return prefix


def _ids(file: ContextFile, model: PreTrainedModel) -> Tensor:
    """The document's tokens `[N]`; raises ContextFileError for what are none of the model's."""
    ids = file.tensor("ids")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise file.damaged(f"its tokens are of {ids.dtype}")
    try:
        check_tokens(model, ids.long())
    except KvfoldError as problem:
        raise file.damaged(f"{problem}") from problem
    return ids.long()


def keeps_scores(header: Header, method: Method) -> bool:
    """True if layers hold the scores by which the context, also read anew, shrinks."""
    return is_nested(method) and any("scores" in layer.by_head for layer in header.layers)


def _check(
    file: ContextFile,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    heads: slice | None,
) -> None:
    """Raises ContextFileError, naming differences of dtype, model, tokenizer or RoPE."""
    header = file.header
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != header.dtype:
        raise ContextFileError(
            f"{file.path} holds {header.dtype}, and the model computes in {dtype}: load it with "
            f"dtype=torch.{header.dtype}, or compress the document again"
        )

    found = model_differences(model_header(model, tokenizer), header.model, weights=heads is None)
    if found:
        raise ContextFileError(f"{file.path} was made with another model: {'; '.join(found)}")
    file.check_rope(*rope_header(model))


def check_model(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises ContextFileError if the file is no context, or of another model."""
    with opened(path) as file:
        _check(file, model, tokenizer, None)


def check_method(path: str | Path) -> None:
    """Raises ContextFileError if the file is no context, or of a method unknown here."""
    with opened(path) as file:
        _method(file)


def _method(file: ContextFile) -> Method:
    for name, module in file.header.origins.items():
        if registered(name) is None:
            found = "a script or notebook" if module == "__main__" else f"the module {module}"
            raise ContextFileError(
                f"{file.path} was made with the method {name!r} of {found}, which is not "
                f"registered here: import its module before kvfold.load, or give the command "
                f"--import {module if module != '__main__' else 'MODULE'} (a name, or a .py file)"
            )
    try:
        method = parse(file.header.method)
    except KvfoldError as problem:
        raise ContextFileError(
            f"{file.path} was made with a method that this kvfold does not have: {problem}"
        ) from problem
    if spelled_out(method) != file.header.method:
        raise ContextFileError(
            f"{file.path} was made with {file.header.method}, and this kvfold has "
            f"{spelled_out(method)}"
        )
    return method


def _fill(
    cache: CompressedCache, file: ContextFile, model: PreTrainedModel, heads: slice | None
) -> None:
    header, coded = file.header, decoded(file, rotations_of(cache))
    by_index: dict[int, LayerHeader | StockLayerHeader] = {p.index: p for p in header.layers}
    by_index |= {p.index: p for p in header.others}
    if sorted(by_index) != list(range(len(cache.layers))):
        raise ContextFileError(
            f"{file.path} holds {len(by_index)} layers, "
            f"and the model's cache has {len(cache.layers)}"
        )
    known, tried = entry_shapes(model), other_layers(model)
    shapes: Iterator[EntryShape | None] = repeat(None) if known is None else iter(known)
    for index, layer in enumerate(cache.layers):
        saved, device = by_index[index], layer_device(model, index)
        kind = layer.__class__.__name__
        if isinstance(saved, LayerHeader) and isinstance(layer, CompressedLayer):
            chosen = range(len(saved.kept))[heads or slice(None)]
            if not chosen:
                raise ContextFileError(f"{file.path} has {len(saved.kept)} heads, none in {heads}")
            prefix = f"layers.{index}."
            by_head, whole = _tensors(file, prefix, saved, chosen, device, coded)
            cold = _cold(file, prefix, saved, chosen, by_head)
            layers.restore(layer, SavedLayer(saved, by_head, whole, cold))
            shape = next(shapes)
            if shape is not None and heads is not None:
                shape = shape._replace(heads=len(chosen))
            counts = [saved.kept[head] for head in chosen]
            layers.check_restored(layer, counts, model.dtype, shape)
        elif isinstance(saved, StockLayerHeader) and saved.kind == kind:
            chosen = _of_other(file, saved, heads)
            by_head, whole = _tensors(file, f"others.{index}.", saved, chosen, device)
            others.restore(layer, saved, by_head, whole, device, header.seen)
            part = None if heads is None else len(chosen)
            others.check_restored(layer, tried.get(index, {}), header.seen, model.dtype, part)
        else:
            raise ContextFileError(f"{file.path} holds no {kind} at layer {index}")
    share_pairs(state.store for state in cache.states)


def _of_other(file: ContextFile, saved: StockLayerHeader, heads: slice | None) -> range:
    """KV heads to read of a layer that is not compressed; raises ContextFileError for a part."""
    count = sum(name.startswith(f"others.{saved.index}.keys.") for name in file.header.checksums)
    if heads is not None and saved.whole and not saved.by_head:
        raise ContextFileError(
            f"layer {saved.index} of {file.path} has a state without heads, so it cannot be loaded "
            "in part: leave out heads="
        )
    return range(count)[heads or slice(None)]


def _cold(
    file: ContextFile, prefix: str, saved: LayerHeader, heads: range, by_head: Named
) -> dict[str, FileRows]:
    """Cold entries of a layer, which stay in the file; takes their sums out of `by_head`."""
    found = {}
    for name in [name for name in saved.by_head if name.endswith(COLD)]:
        sums = [each.cpu() for each in by_head.pop(name.removesuffix(COLD) + SUMS)]
        names = [file.header.same_as.get(n, n) for n in (f"{prefix}{name}.{h}" for h in heads)]
        found[name] = FileRows.of(file.held, names, sums)
    return found


def _tensors(
    file: ContextFile,
    prefix: str,
    saved: LayerHeader | StockLayerHeader,
    heads: range,
    device: torch.device,
    coded: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Named, dict[str, Tensor]]:
    """A layer's tensors on its device: those per KV head, and those of all heads.

    `coded` are those that a codec holds.
    """

    def tensor(name: str) -> Tensor:
        return coded[name] if name in coded else file.tensor(name)

    by_head = {
        name: [tensor(f"{prefix}{name}.{head}").to(device) for head in heads]
        for name in saved.by_head
        if not name.endswith(COLD)
    }
    return by_head, {name: file.tensor(f"{prefix}{name}").to(device) for name in saved.whole}
