# SPDX-License-Identifier: Apache-2.0
"""`RaggedStore`: each row's KV head holds its own number of entries, encoded or raw."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.errors import UnsupportedModel
from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.gather import pick, take_flat
from kvfold.kernels.views import Flat, Named, RaggedView
from kvfold.store.base import Store
from kvfold.store.encoding import Encode, QueriedKeys
from kvfold.store.paired import Paired, Pairing, extend_pair
from kvfold.store.ragged_part import Part, divided

# Values encoded together while decoding: each such lot copies all encoded values once.
LOT = 32


class RaggedStore(Store):
    """Keys, values and columns of a layer, one segment per row and KV head.

    Columns are stored for the entries kept by the last compression, int32; None while slot i is
    column i. The columns of newer entries are consecutive.
    """

    kind: ClassVar[Literal["segments"]] = "segments"
    is_dense = False

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        columns: Tensor | None,
        slots: Tensor,
        encode: Encode,
        bias: Tensor | None = None,
    ) -> None:
        """Copies entries at `slots [B, H, K]` of keys `[B, H, T, D]` and values `[B, H, T, Dv]`.

        `columns [B, H, T]`; None: slot i is column i, and all entries are taken. `bias [B, H, T]`;
        None: no entry has one.
        """
        self.rows, self.heads = keys.shape[:2]
        self.encode = encode
        self._settle(columns, slots)
        if encode.raw:
            lengths = [encode.key_count(entries, 0, decoding=False) for entries in self._counts]
            old, newest = divided(slots, self._counts, lengths)
            flat = take_flat(keys, values, old)
            self._keys, self._values = (
                Part.begun(Flat(of_old, lengths), rows, newest)
                for of_old, rows in zip(flat, (keys, values), strict=True)
            )
        else:
            self._keys, self._values = Part(keys, slots), Part(values, slots)
        self._bias: Part | None = None  # [B, H, T, 1]
        if bias is not None:
            self.set_bias(pick(bias, slots, 0)[..., slots.shape[-1] - self.length :])

    @classmethod
    def from_named(
        cls, parts: Named, heads: int, encode: Encode, new: int, first_new: int
    ) -> RaggedStore:
        """Copy from `named` tensors; the last `new` entries are columns from `first_new` on."""
        store = cls.__new__(cls)
        store.heads, store.encode = heads, encode
        of_keys, of_values, of_bias = (
            {name.removeprefix(kind): p for name, p in parts.items() if name.startswith(kind)}
            for kind in ("keys.", "values.", "bias.")
        )
        store._keys = Part.from_named(of_keys, heads, encode.keys_from)
        store._values = Part.from_named(of_values, heads, encode.values_from)
        store._bias = Part.from_named(of_bias, heads, Encode().keys_from) if of_bias else None
        store.biased = bool(of_bias)
        store.rows = len(store._keys.gaps) // heads
        store._new, store._first_new = new, first_new
        seen = store._keys.view()
        store._counts = [seen.length(i) - new for i in range(len(seen.gaps))]
        store._columns = torch.cat(parts["columns"]) if "columns" in parts else None
        return store

    def named(self) -> Named:
        """All tensors by name, as views, one for each segment."""
        parts: Named = {}
        if self._columns is not None:
            parts["columns"] = list(self._columns.split(self._counts))
        for kind, part in (("keys", self._keys), ("values", self._values), ("bias", self._bias)):
            if part is not None:
                parts |= {f"{kind}.{name}": tensors for name, tensors in part.named().items()}
        return parts

    @property
    def new(self) -> tuple[int, int]:
        """Number of entries appended since the last compression, and the column of the first."""
        return self._new, self._first_new

    def _settle(self, columns: Tensor | None, slots: Tensor) -> None:
        self._counts = (slots >= 0).sum(-1).flatten().tolist()
        self._columns: Tensor | None = None
        if columns is not None:
            kept = columns.gather(2, slots.clamp(min=0))
            self._columns = kept[slots >= 0].int()
        self._new = self._first_new = 0

    @property
    def keys(self) -> Tensor:
        """Raw keys `[B, H, T, D]` of the tail."""
        return self._keys.tail.rows

    @property
    def values(self) -> Tensor:
        """Raw values `[B, H, T, Dv]` of the tail."""
        return self._values.tail.rows

    @property
    def length(self) -> int:
        """Entries of the longest segment."""
        return max(self._counts) + self._new

    def fork(self) -> RaggedStore:
        """A store that shares all present entries and grows by itself."""
        other = copy.copy(self)
        other._keys, other._values = self._keys.fork(), self._values.fork()
        other._bias = None if self._bias is None else self._bias.fork()
        return other

    def unshare(self) -> None:
        for part in self._parts():
            part.unshare()

    def view(self) -> RaggedView | None:
        """View for attention; a later append does not change it.

        None while every entry is raw in the tail, nothing was evicted and nothing has a bias:
        `keys` and `values` are then complete.
        """
        parts = (self._keys.encoded, self._values.encoded)
        whole = self._columns is None and self._bias is None
        if whole and not any(any(p.lengths) for p in parts if p is not None):
            return None
        return self.segments()

    def segments(self) -> RaggedView:
        """View of all segments, also while every entry is in the tail."""
        bias = None if self._bias is None else self._bias.view()
        return RaggedView(self._keys.view(), self._values.view(), self._new, bias)

    def reserve(self, room: int) -> RaggedView:
        """View whose tails end with room for `room` entries: write there, then append."""
        keys, values, *bias = (part.reserve(room) for part in self._parts())
        return RaggedView(keys, values, self._new + room, *bias)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Decoded keys `[B, H, T, D]` and values `[B, H, T, Dv]`, padded on the left."""
        return self._keys.rectangle(self.length), self._values.rectangle(self.length)

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.rectangle(self.length)[..., 0]

    def set_bias(self, bias: Tensor) -> None:
        rows, length = bias.float()[..., None], bias.shape[-1]
        counts = [count + self._new for count in self._counts]
        slots = torch.arange(length, device=bias.device).expand(bias.shape)
        first = length - torch.tensor(counts, device=bias.device).view(*bias.shape[:2], 1)
        slots = slots.masked_fill(slots < first, -1)
        keys, self.biased = self._keys.encoded, True
        if isinstance(keys, Flat):  # kernels read a raw key together with its bias
            old, slots = divided(slots, counts, keys.lengths)
            encoded = pick(rows[..., 0], old, 0)[old >= 0][:, None]
            self._bias = Part.begun(Flat(encoded, keys.lengths), rows, slots)
        else:
            self._bias = Part(rows, slots)

    @property
    def columns(self) -> Tensor:
        """Columns of the entries `[B, H, T]`, int64, −1 where a shorter segment is padded."""
        device, length, old = self.keys.device, self.length, self.length - self._new
        out = torch.full((len(self._counts), length), -1, device=device)
        out[:, old:] = torch.arange(self._first_new, self._first_new + self._new, device=device)
        if self._columns is None:
            out[:, :old] = torch.arange(old, device=device)
        else:
            for row, part in zip(out, self._columns.split(self._counts), strict=True):
                row[old - len(part) : old] = part
        return out.unflatten(0, (self.rows, self.heads))

    @property
    def pairs(self) -> bool:
        """True if two layers share their entries' directions (MiniCache)."""
        return self.encode.pairs

    @property
    def encoded(self) -> bool:
        """True if entries are encoded, or will be."""
        return not self.encode.raw

    @property
    def fixed(self) -> Tensor | None:
        """Bool mask `[B, H, T]` of entries whose key or value is encoded; None if any may leave."""
        if self.encode.raw or self.encode.standalone:
            return None
        views = (self._keys.view(), self._values.view())
        lengths = [views[0].length(i) for i in range(len(self._counts))]
        encoded = [part.encoded.lengths for part in views if part.encoded is not None]
        oldest = [max(each) for each in zip(*encoded, strict=True)] or [0] * len(lengths)
        first = self.length - torch.tensor(lengths, device=self.keys.device)[:, None]
        slot = torch.arange(self.length, device=self.keys.device)
        last = first + torch.tensor(oldest, device=self.keys.device)[:, None]
        return ((slot >= first) & (slot < last)).unflatten(0, (self.rows, self.heads))

    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        stored = self._keys.tail.append(keys), self._values.tail.append(values)
        if self._bias is not None:
            self._bias.tail.append(keys.new_zeros(*keys.shape[:3], 1, dtype=torch.float32))
        if self._new == 0:
            self._first_new = first
        self._new += keys.shape[2]
        return stored

    def keep(self, slots: Tensor) -> None:
        """Evicts all entries but those at `slots [B, H, K]`, −1 for holes.

        All encoded entries must be among them, unless each stands alone.
        """
        length, shared = self.length, self.length - self.own_length
        if shared < length:
            self._keep_own(slots, shared)
            return
        complete = self._columns is None and slots.shape[-1] == length and bool((slots >= 0).all())
        columns = None if complete else self.columns
        for part in self._parts():
            part.keep(slots, length)
        self._settle(columns, slots)

    @property
    def own_length(self) -> int:
        return self._keys.own_length

    def _keep_own(self, slots: Tensor, shared: int) -> None:
        columns = self.columns.gather(2, slots)
        for part in self._parts():
            part.keep_own(slots[..., shared:] - shared)
        every = torch.arange(columns.shape[-1], device=slots.device).expand_as(columns)
        self._settle(columns, every.masked_fill(columns < 0, -1))

    def due(
        self, decoding: bool, ended: Sequence[bool], more: int = 0
    ) -> tuple[list[int], list[int]]:
        """Number of keys and of values of each segment to encode, `more` entries from now.

        None are of rows that have `ended`; empty: none has.
        """

        def value_count(entries: int, encoded: int) -> int:
            count = self.encode.value_count(entries, encoded, decoding)
            in_lots = decoding and not self.encode.pairs  # pairs bring their own blocks
            return count - (count - encoded) % LOT if in_lots else count

        def key_count(entries: int, encoded: int) -> int:
            return self.encode.key_count(entries, encoded, decoding)

        parts = self._keys.due(key_count, more), self._values.due(value_count, more)
        for counts in parts if any(ended) else ():
            counts[:] = [0 if ended[i // self.heads] else n for i, n in enumerate(counts)]
        return parts

    def encode_due(
        self,
        decoding: bool,
        seen: QueriedKeys | None = None,
        ended: Sequence[bool] = (),
        place: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Encodes the entries that are due; true if there were any.

        `seen` is the layer's observation when a prefill ends, None while decoding. Nothing is due
        of rows that have `ended`; empty: none has. `place` gives the positions of columns; None:
        the columns.
        """
        of_keys, of_values = self.due(decoding, ended)
        keys, values = self._keys, self._values
        first = keys.encoded is None
        if first or any(of_keys):
            among = keys.unencoded(self.columns, place) if self.encode.standalone else None
            keys.accept(self.encode.keys(keys.oldest(of_keys), seen, keys.encoded, among))
        if first or any(of_values):
            values.accept(self.encode.values(values.oldest(of_values), values.encoded))
        return any(of_keys) or any(of_values)

    def warm(self, hot: Tensor) -> None:
        """Has the entries `hot [B, H, T]` read by every query, and others when codes find them."""
        for part in (self._keys, self._values):
            part.warm(hot, self.length)

    @property
    def hot(self) -> Tensor | None:
        """Bool mask `[B, H, T]` of the entries that every query reads; None: all are."""
        return self._keys.hot(self.length) if self.encode.recalls else None

    def begin_beside(self, old: RaggedStore) -> None:
        """Lets entries that are encoded from now on share what those in `old` do, as a mean."""
        for mine, theirs in ((self._keys, old._keys), (self._values, old._values)):
            mine.begin_beside(theirs)

    def keep_codes(self, old: RaggedStore, keys: Tensor, values: Tensor) -> None:
        """Keeps the codes that `old` has, as rounding its decoded entries again adds an error.

        `keys` and `values [B, H, T]` are each entry's slots in `old`, −1 where that is another one.
        """
        pairs = ((self._keys, old._keys, keys), (self._values, old._values, values))
        alive = (self.columns >= 0).flatten(0, 1)
        for mine, theirs, slots in pairs:
            of_segments = zip(slots.flatten(0, 1), alive, strict=True)
            mine.keep_codes(theirs, [at[there] for at, there in of_segments], old.length)

    def encode_with(self, second: RaggedStore, decoding: bool, ended: Sequence[bool] = ()) -> bool:
        """Encodes the entries that are due in both layers of a pair; true if there were any.

        `ended` is that of `encode_due`. Raises UnsupportedModel for layers on two devices.
        """
        assert isinstance(self.encode, Pairing)
        if self.keys.device != second.keys.device:
            raise UnsupportedModel(
                "MiniCache's pairs of layers share one tensor of directions, and the layers of a "
                f"pair are on {self.keys.device} and {second.keys.device}: put them on one device"
            )
        mine, theirs = self.due(decoding, ended), second.due(decoding, ended)
        parts = ((self._keys, second._keys), (self._values, second._values))
        for (own, other), counts, others in zip(parts, mine, theirs, strict=True):
            if own.encoded is not None and not any(counts):
                continue
            both = self.encode.pair(own.oldest(counts), other.oldest(others))
            if isinstance(own.encoded, Paired) and isinstance(other.encoded, Paired):
                both = extend_pair(own.encoded, other.encoded, *both)
            own.become(both[0])
            other.become(both[1])
        return any(map(any, mine))

    def share_with(self, first: RaggedStore) -> None:
        """Lets this second layer of a pair share directions with the first again, after a copy."""
        for own, other in ((self._keys, first._keys), (self._values, first._values)):
            assert isinstance(own.encoded, Paired) and isinstance(other.encoded, Paired)
            own.encoded = replace(own.encoded, shared=other.encoded.shared)

    def crop(self, count: int) -> None:
        """Drops the last `count` entries of every head, all appended since the last compression."""
        self._new -= count
        for part in self._parts():
            part.crop(count)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to all tensors."""
        order = rows(torch.arange(self.rows, device=self.keys.device)).tolist()
        segments = [row * self.heads + head for row in order for head in range(self.heads)]
        for part in self._parts():
            part.index(rows, segments)
        if self._columns is not None:
            parts = self._columns.split(self._counts)
            self._columns = torch.cat([parts[i] for i in segments])
        self._counts = [self._counts[i] for i in segments]
        self.rows = len(order)

    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of columns and biases, and of slack; skips `counted`."""
        sizes = [part.nbytes(counted) for part in (self._keys, self._values)]
        beside, slack = (0, 0) if self._bias is None else self._bias.nbytes(counted)
        beside += 0 if self._columns is None else 4 * self._columns.numel()
        return sum(stored for stored, _ in sizes), beside, slack + sum(room for _, room in sizes)

    def cold_bytes(self) -> ColdBytes:
        both = self._keys.cold_bytes(), self._values.cold_bytes()
        return ColdBytes(*map(sum, zip(*both, strict=True)))

    def nbytes_per_row(
        self, kept: Sequence[Sequence[int]], whole: Sequence[bool], counted: set[int]
    ) -> list[float]:
        columns = 0 if self._columns is None else self._columns.element_size()
        counts = [self._counts[i : i + self.heads] for i in range(0, len(self._counts), self.heads)]
        beside = [0 if all_ else columns * sum(n) for n, all_ in zip(counts, whole, strict=True)]
        of_parts = [part.nbytes_per_row(counted) for part in self._parts()]
        return [sum(each) for each in zip(beside, *of_parts, strict=True)]

    def _parts(self) -> list[Part]:
        return [part for part in (self._keys, self._values, self._bias) if part is not None]


def share_pairs(stores: Iterable[Store | None]) -> None:
    """Lets the stores of paired layers share directions again, after each was copied alone."""
    paired = [store for store in stores if isinstance(store, RaggedStore) and store.pairs]
    for first, second in zip(paired[::2], paired[1::2], strict=True):
        second.share_with(first)
