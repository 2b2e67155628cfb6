# SPDX-License-Identifier: Apache-2.0
"""Codecs of context files: the tensors that they take, and back, keys turned to position 0."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.codecs import kivi, kvtc
from kvfold.codecs.basis import Basis, Scope
from kvfold.codecs.codec import Kvtc, Plain, codec_of, spelled
from kvfold.codecs.compression import Compressor, compressed_tensor, compressor
from kvfold.codecs.symbols import CodedStreams
from kvfold.contexts.files.bounds import TIMES, decoding_bytes, unpacked_bytes
from kvfold.contexts.files.format import ContextFile
from kvfold.contexts.files.header import (
    CodecHeader,
    EntriesHeader,
    LayerHeader,
    StockLayerHeader,
    StreamHeader,
)
from kvfold.errors import CodecRefusal, ContextFileError, KvfoldError, ScorerFileError
from kvfold.fitted.file import digest_of_file, read_kind
from kvfold.fitted.of_model import read_fitted
from kvfold.hf.models import caches_latents, layer_device
from kvfold.hf.rotation import Rotation
from kvfold.store.dense import DenseStore

SIDES = ("keys", "values")
PARTS = tuple(field.name for field in dataclasses.fields(CodedStreams))


class NamedHead(NamedTuple):
    """A KV head of `layer`: `names` of keys and values, and of the tensors that it may have."""

    layer: LayerHeader
    names: tuple[str, str]
    listed: str | None  # columns of its entries, or none while all are there
    tail: str | None  # raw keys of a ragged store
    moves: str | None


class CodedHead(NamedTuple):
    """A KV head whose keys and values are coded: `names` of both, columns and positions `[n]`."""

    layer: int
    names: tuple[str, str]
    columns: Tensor
    positions: Tensor


Encoded = tuple[dict[str, Tensor], dict[str, str], CodecHeader]


@dataclass(frozen=True)
class Coding:
    """A codec, with the basis that it names, whose digest is `digest`."""

    compressor: Compressor
    codec: Kvtc | Plain = "zstd"
    basis: Basis | None = None
    digest: str = ""

    @classmethod
    def of(cls, codec: str, model: PreTrainedModel) -> Coding:
        """A codec for contexts of a model; raises KvfoldError, and ScorerFileError for its file."""
        chosen = codec_of(codec)
        if not isinstance(chosen, Kvtc):
            return cls(compressor(), chosen)
        basis = read_fitted(chosen.file, model, Basis)
        return cls(compressor(), chosen, basis, digest_of_file(chosen.file))

    def encode(
        self,
        cache: CompressedCache,
        stored: Mapping[str, Tensor],
        same_as: Mapping[str, str],
        headers: Sequence[LayerHeader | StockLayerHeader],
    ) -> Encoded:
        """Tensors of a file, names of those stored once, and the codec's header.

        Raises CodecRefusal for entries that this codec cannot hold.
        """
        kept, same, made = dict(stored), dict(same_as), dict[str, Tensor]()
        entries, coded = None, set[str]()
        if self.codec != "zstd":
            entries, made, coded = self._entries(cache, stored, same_as, headers)
            same = {name: other for name, other in same.items() if name not in coded}
            kept = {name: tensor for name, tensor in stored.items() if name not in coded}
            if self.codec == "kivi4":
                kept, made = kept | made, {}
        streams = {
            name: StreamHeader.model_validate(
                {"dtype": _name(tensor.dtype), "shape": list(tensor.shape)}
            )
            for name, tensor in kept.items()
        }
        made |= {name: compressed_tensor(each, self.compressor) for name, each in kept.items()}
        # The tokens bound what a file becomes, and what shrinks to nothing is no file's burden.
        for name, each in kept.items():
            if name == "ids" or each.nbytes > TIMES * made[name].nbytes:
                made[name] = each
                del streams[name]
        header = CodecHeader(
            codec=spelled(self.codec), compressor=self.compressor, streams=streams, entries=entries
        )
        return made, same, header

    def _entries(
        self,
        cache: CompressedCache,
        stored: Mapping[str, Tensor],
        same_as: Mapping[str, str],
        headers: Sequence[LayerHeader | StockLayerHeader],
    ) -> tuple[EntriesHeader | None, dict[str, Tensor], set[str]]:
        """The header and streams of keys and values, and the names of the tensors in them.

        Nothing for a text too short for its codes to be smaller.
        """
        layers = [header for header in headers if isinstance(header, LayerHeader)]
        _check(layers, cache.states[0].plan.rotation.model)

        def tensor(name: str) -> Tensor:
            return stored[same_as.get(name, name)]

        heads = list(_heads(layers, tensor))
        names = {name for head in heads for name in head.names}
        if isinstance(self.codec, Kvtc):
            found = self._in_steps(cache, heads, tensor, self.codec)
            return (None, {}, set()) if found is None else (*found, names)
        made = dict[str, Tensor]()
        for side, name in enumerate(SIDES):
            given = [tensor(head.names[side]) for head in heads]
            coded = kivi.encode(given, by_channel=name == "keys")
            made |= {f"codec.{name}.{part}": each for part, each in coded.items()}
        return None, made, names

    def _in_steps(
        self,
        cache: CompressedCache,
        heads: Sequence[CodedHead],
        tensor: Callable[[str], Tensor],
        chosen: Kvtc,
    ) -> tuple[EntriesHeader, dict[str, Tensor]] | None:
        """The header and streams in steps of the basis; None if they would not be smaller."""
        assert self.basis is not None
        scope, seen = _scope(heads), cache.get_seq_length()
        whole = _whole(heads, chosen.sinks, seen - chosen.window)
        made, steps = dict[str, Tensor](), []
        shares = (kvtc.KEYS_SHARE, 1 - kvtc.KEYS_SHARE)
        entries = sum(int((~each).sum()) for each in whole)
        numbers = entries * 2 * self.basis.key_means.shape[-1]
        for side, (name, share) in enumerate(zip(SIDES, shares, strict=True)):
            given = [tensor(head.names[side]) for head in heads]
            rest = [each[~kept] for each, kept in zip(given, whole, strict=True)]
            if name == "keys":
                rest = list(_turned(rotations_of(cache), heads, whole, rest, back=True))
            transform = getattr(self.basis, name)
            coded = kvtc.encode(rest, transform, scope, share * 2 * numbers / chosen.ratio)
            if coded is None:
                return None
            made |= {f"codec.{name}.{part}": getattr(coded.streams, part) for part in PARTS}
            edges = [each[kept] for each, kept in zip(given, whole, strict=True)]
            made[f"codec.{name}.whole"] = torch.cat(edges)
            steps.append(coded.step)
        packed = sum(each.nbytes for each in made.values())
        if decoding_bytes(entries, self.basis.width) > TIMES * packed:
            return None  # loading would refuse it
        header = EntriesHeader(basis=self.digest, scope=scope, steps=(steps[0], steps[1]))
        return header, made


def rotations_of(cache: CompressedCache) -> dict[int, Rotation]:
    """RoPE of each compressed layer, by its index."""
    return {
        index: layer.state.plan.rotation
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, CompressedLayer)
    }


def decoded(file: ContextFile, rotations: Mapping[int, Rotation]) -> dict[str, Tensor]:
    """Keys and values that a file's codec holds, by their names; none without such a codec.

    `rotations` are of the layers of the model that made the file. Raises ContextFileError as
    `basis_of`, and for entries that do not fit the model or the codec.
    """
    codec = file.header.codec
    if codec is None:
        return {}
    try:
        if codec.codec == "kivi4":
            return _unpacked(file)
        basis = basis_of(file)
        if codec.entries is None or basis is None:
            return {}
        return _decoded(file, rotations, codec, codec.entries, basis)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        raise file.damaged(f"its codec does not fit its entries ({problem})") from problem


def _unpacked(file: ContextFile) -> dict[str, Tensor]:
    """Keys and values that `codecs/kivi.py` has quantized."""
    heads, found = list(_named_heads(file.header.layers)), dict[str, Tensor]()
    counts = [_count(file, head) for head in heads]
    for side, name in enumerate(SIDES):
        parts = {part: file.tensor(f"codec.{name}.{part}") for part in kivi.PARTS}
        made = kivi.decode(parts, counts, by_channel=name == "keys")
        found |= {head.names[side]: each for head, each in zip(heads, made, strict=True)}
    return found


def _decoded(
    file: ContextFile,
    rotations: Mapping[int, Rotation],
    codec: CodecHeader,
    entries: EntriesHeader,
    basis: Basis,
) -> dict[str, Tensor]:
    chosen = _kvtc(file, codec)
    count = sum(_count(file, head) for head in _named_heads(file.header.layers))
    if (size := decoding_bytes(count, basis.width)) > unpacked_bytes(file.size):
        raise file.damaged(f"its {file.size:,} bytes would become {size:,}")
    heads = list(_heads(file.header.layers, file.tensor))
    whole = _whole(heads, chosen.sinks, file.header.seen - chosen.window)
    dtype, found = getattr(torch, file.header.dtype), dict[str, Tensor]()
    for side, (name, step) in enumerate(zip(SIDES, entries.steps, strict=True)):
        parts = [file.tensor(f"codec.{name}.{part}") for part in PARTS]
        coded, transform = kvtc.CodedSide(CodedStreams(*parts), step), getattr(basis, name)
        counts = [int((~kept).sum()) for kept in whole]
        rest = kvtc.decode(coded, transform, entries.scope, counts)
        if name == "keys":
            rest = list(_turned(rotations, heads, whole, rest, back=False))
        edges = file.tensor(f"codec.{name}.whole").split([int(kept.sum()) for kept in whole])
        for head, each, edge, kept in zip(heads, rest, edges, whole, strict=True):
            found[head.names[side]] = _merged(each, edge, kept, dtype)
    return found


def _merged(rest: Tensor, edge: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries `[n, D]`: `edge` where they are `whole [n]`, `rest` elsewhere."""
    made = torch.empty(len(whole), rest.shape[-1], dtype=dtype)
    inner = (~whole).nonzero()[:, 0]
    first, last = (int(inner[0]), int(inner[-1]) + 1) if len(inner) else (0, 0)
    if last - first == len(inner):  # a slice is several times as fast
        made[first:last], made[:first], made[last:] = rest, edge[:first], edge[first:]
    else:
        made[~whole], made[whole] = rest.to(dtype), edge
    return made


def _named_heads(layers: Sequence[LayerHeader]) -> Iterator[NamedHead]:
    """KV heads of all layers, with the names of their tensors."""
    for layer in layers:
        prefix, dense = f"layers.{layer.index}.", layer.store == DenseStore.kind
        part, listed = ("", "positions") if dense else (".rows", "columns")
        for head in range(len(layer.kept)):
            yield NamedHead(
                layer,
                (f"{prefix}keys{part}.{head}", f"{prefix}values{part}.{head}"),
                f"{prefix}{listed}.{head}" if listed in layer.by_head else None,
                None if dense else f"{prefix}keys.tail.{head}",
                f"{prefix}moves.{head}" if "moves" in layer.by_head else None,
            )


def _count(file: ContextFile, head: NamedHead) -> int:
    """Entries of a head that are coded, by the shapes of its tensors."""
    count = head.layer.seen
    if head.listed is not None:
        count = file.length(head.listed) + (0 if head.tail is None else head.layer.new)
    return count - (0 if head.tail is None else file.length(head.tail))


def _heads(layers: Sequence[LayerHeader], tensor: Callable[[str], Tensor]) -> Iterator[CodedHead]:
    """KV heads of all layers, with columns as `format.py` says, without ragged stores' tails."""
    for head in _named_heads(layers):
        layer, dense = head.layer, head.tail is None
        if head.listed is None:
            columns = torch.arange(layer.seen)
        else:
            columns = tensor(head.listed).long()
            newest = torch.arange(layer.first_new, layer.first_new + layer.new)
            columns = columns if dense else torch.cat([columns, newest])
        raw = 0 if head.tail is None else len(tensor(head.tail))
        columns = columns[: len(columns) - raw]
        positions = columns.clamp(min=0)
        if head.moves is not None:
            moves = tensor(head.moves).long()[: len(positions)]
            positions[: len(moves)] += moves
        yield CodedHead(layer.index, head.names, columns, positions)


def _check(layers: Sequence[LayerHeader], model: PreTrainedModel) -> None:
    """Raises CodecRefusal for entries that kivi4 and kvtc cannot hold."""
    names = {name for layer in layers for name in (*layer.by_head, *layer.whole)}
    reason = None
    if caches_latents(model):
        reason = f"{type(model).__name__} caches latents, and this codec is for keys and values"
    elif "valid" in names:
        reason = "the document was read with padding"
    elif any("keys" not in layer.by_head and "keys.rows" not in layer.by_head for layer in layers):
        reason = "its entries are encoded already"
    if reason is not None:
        raise CodecRefusal(f'{reason}: save it with codec="zstd"')


def _scope(heads: Sequence[CodedHead]) -> Scope:
    """All heads together if they keep the same tokens."""
    first = heads[0].columns
    return "joint" if all(torch.equal(head.columns, first) for head in heads) else "head"


def _whole(heads: Sequence[CodedHead], sinks: int, window: int) -> list[Tensor]:
    """Entries of each head that stay whole: columns below `sinks`, and from `window` on."""
    return [(head.columns < sinks) | (head.columns >= window) for head in heads]


def _turned(
    rotations: Mapping[int, Rotation],
    heads: Sequence[CodedHead],
    whole: Sequence[Tensor],
    keys: Sequence[Tensor],
    back: bool,
) -> Iterator[Tensor]:
    """Keys `[n, D]` of each head's coded entries turned by their positions, or back; float32."""
    of_heads = zip(heads, whole, keys, strict=True)
    for index, of_layer in itertools.groupby(of_heads, key=lambda found: found[0].layer):
        rotation, given = rotations[index], list(of_layer)
        device = layer_device(rotation.model, index)
        if device.type == "meta":  # a model without weights: vLLM has them
            device = torch.device("cpu")
        moves = [head.positions[~kept].to(device) for head, kept, _ in given]
        if all(torch.equal(move, moves[0]) for move in moves[1:]):  # one angle for all heads
            together = [(torch.stack([each for _, _, each in given]), moves[0])]
        else:
            together = [(each[None], at) for (_, _, each), at in zip(given, moves, strict=True)]
        for each, at in together:
            turned = rotation(each.float()[None].to(device), -at[None] if back else at[None])
            yield from turned[0].cpu()


def _kvtc(file: ContextFile, codec: CodecHeader) -> Kvtc:
    try:
        chosen = codec_of(codec.codec)
    except KvfoldError as problem:
        raise ContextFileError(f"{file.path}: {problem}") from problem
    if not isinstance(chosen, Kvtc):
        raise file.damaged("its codec has no basis")
    return chosen


def basis_of(file: ContextFile) -> Basis | None:
    """The basis that a file names, beside it or where it was; None without coded entries.

    The file is of the basis's model, as it was when the context was saved. Raises ContextFileError
    for another basis or none.
    """
    codec = file.header.codec
    if codec is None or codec.entries is None:
        return None
    named, digest = _kvtc(file, codec).file, codec.entries.basis
    told = f"{file.path} is coded in the basis {named} ({digest[:8]})"
    places = [
        place for place in (file.path.parent / Path(named).name, Path(named)) if place.exists()
    ]
    if not places:
        raise ContextFileError(f"{told}, which is not there: put a copy of it beside the context")
    try:
        for place in places:
            if digest_of_file(place) == digest:
                return _kept_basis(place, digest)
    except ScorerFileError as problem:
        raise ContextFileError(f"{told}: {problem}") from problem
    raise ContextFileError(f"{told}, and {places[0]} is another basis: put a copy of it there")


@lru_cache(maxsize=1)
def _kept_basis(place: Path, digest: str) -> Basis:
    """Kept, as what decoding needs is computed from it; its file has this digest."""
    return read_kind(place, Basis)[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
