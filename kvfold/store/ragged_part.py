# SPDX-License-Identifier: Apache-2.0
"""`Part`: keys or values of all segments, the oldest encoded, the newest in a raw tail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.gather import pick
from kvfold.kernels.recalled import Recalled
from kvfold.kernels.views import Encoded, Named, PartView, Standalone
from kvfold.store.buffer import GrowingBuffer
from kvfold.store.encoding import Unencoded
from kvfold.store.shared_buffer import SharedBuffer

# Free slots of the tail: few, as the tail is small beside the encoded entries.
ROOM = 16


class Part:
    """Keys or values of all segments: encoded entries, then a raw tail `[B, H, T, D]`.

    Segment i = `b·H + h` is row b's KV head h. Its tail begins with `gaps[i]` slots that hold none
    of its entries, and ends with its newest entry.
    """

    gaps: tuple[int, ...]

    def __init__(self, rows: Tensor, slots: Tensor) -> None:
        """Copies entries of `rows [B, H, T, D]` at `slots [B, H, K]`; holes (−1) on the left."""
        self.encoded: Encoded | None = None
        self._take(rows, slots)

    @classmethod
    def begun(cls, encoded: Encoded, rows: Tensor, slots: Tensor) -> Part:
        """A part of `encoded` entries, followed by those of `rows` at `slots`."""
        part = cls(rows, slots)
        part.encoded = encoded
        return part

    @classmethod
    def from_named(cls, parts: Named, heads: int, encoded: Callable[[Named, int], Encoded]) -> Part:
        """Copy from the tensors of `named`; `encoded(named, size)` makes the encoded entries."""
        part, tail = cls.__new__(cls), parts["tail"]
        width, size = max(map(len, tail)), tail[0].shape[-1]
        part.gaps = tuple(width - len(newest) for newest in tail)
        rows = tail[0].new_zeros(len(tail), width, size)
        for into, newest, gap in zip(rows, tail, part.gaps, strict=True):
            into[gap:] = newest
        part.tail = GrowingBuffer(rows.unflatten(0, (-1, heads)), ROOM)
        old = {name: of_segments for name, of_segments in parts.items() if name != "tail"}
        part.encoded = encoded(old, size) if old else None
        return part

    def named(self) -> Named:
        """All tensors by name, one for each segment, as views; the tails without padding."""
        segments = zip(self.tail.rows.flatten(0, 1), self.gaps, strict=True)
        tail = [of_segment[gap:] for of_segment, gap in segments]
        return {"tail": tail} | ({} if self.encoded is None else self.encoded.named())

    def _take(self, rows: Tensor, slots: Tensor) -> None:
        alive = (slots >= 0).sum(-1).flatten().tolist()
        width = max(alive)
        slots = slots[..., slots.shape[-1] - width :].clamp(min=0)
        self.tail = GrowingBuffer.gathered(rows, slots, ROOM)
        self.gaps = tuple(width - count for count in alive)

    @property
    def alive(self) -> list[int]:
        """Tail entries of each segment."""
        return [self.tail.length - gap for gap in self.gaps]

    def fork(self) -> Part:
        """A part that shares all present entries and grows by itself."""
        other = copy.copy(self)
        other.tail = SharedBuffer(self.tail.rows)
        return other

    def unshare(self) -> None:
        """Copies a tail that it shares; encoded entries never change, and may stay shared."""
        if isinstance(self.tail, SharedBuffer):
            self.tail = GrowingBuffer(self.tail.rows, ROOM)

    def view(self) -> PartView:
        """View for one attention call."""
        shown = self.tail.shown  # in a step, a property less
        return PartView(self.encoded, self.tail.rows if shown is None else shown, self.gaps)

    def reserve(self, room: int) -> PartView:
        """View whose tail ends with `room` free slots, which are zero."""
        length = self.tail.length
        return PartView(self.encoded, self.tail.reserve(room)[:, :, : length + room], self.gaps)

    def rectangle(self, length: int) -> Tensor:
        """All entries, decoded, `[B, H, length, D]`; shorter segments padded on the left."""
        seen, rows = self.view(), self.tail.rows
        out = rows.new_zeros(len(self.gaps), length, rows.shape[-1])
        for i in range(len(self.gaps)):
            torch.cat(seen.pieces(i), out=out[i, length - seen.length(i) :])
        return out.unflatten(0, rows.shape[:2])

    def crop(self, count: int) -> None:
        """Drops the last `count` entries of every segment."""
        self.tail.crop(count)

    def keep(self, slots: Tensor, length: int) -> None:
        """Keeps the entries at `slots [B, H, K]`, and all encoded ones that do not stand alone.

        Slots count in `rectangle(length)`.
        """
        if isinstance(self.encoded, Standalone):
            stay = self._encoded_at(slots, length)
            if [len(entries) for entries in stay] != self.encoded.lengths:
                self.encoded = self.encoded.kept(stay)
        first = torch.tensor(self.gaps, device=slots.device).view(*slots.shape[:2], 1)
        in_tail = slots - length + self.tail.length
        self._take(self.tail.rows, torch.where((slots >= 0) & (in_tail >= first), in_tail, -1))

    def keep_codes(self, old: Part, slots: list[Tensor], length: int) -> None:
        """Gives each segment's entries the codes that `old` has at their `slots [n]`, −1 for none.

        Slots count in `old.rectangle(length)`. Only entries that stand alone have codes to keep.
        """
        new, before = self.encoded, old.encoded
        if isinstance(new, Standalone) and isinstance(before, Standalone):
            seen, places = old.view(), []
            for i, at in enumerate(slots):
                place = at[: new.lengths[i]] - (length - seen.length(i))
                places.append(place.masked_fill(place >= before.lengths[i], -1))
            self.encoded = new.with_codes_of(before, places)

    def warm(self, hot: Tensor, length: int) -> None:
        """Has the `hot [B, H, length]` among the encoded entries read by every query."""
        if isinstance(self.encoded, Recalled):
            slots = torch.arange(length, device=hot.device).where(hot, -1)
            places = self._encoded_at(slots, length)
            self.encoded = self.encoded.warmed(places)

    def hot(self, length: int) -> Tensor:
        """Bool mask `[B, H, length]` of the entries that every query reads."""
        batch, heads = self.tail.rows.shape[:2]
        out = torch.ones(batch * heads, length, dtype=torch.bool, device=self.tail.rows.device)
        if isinstance(self.encoded, Recalled):
            seen = self.view()
            for i, mask in enumerate(self.encoded.is_hot()):
                first = length - seen.length(i)
                out[i, first : first + len(mask)] = mask
        return out.unflatten(0, (batch, heads))

    def _encoded_at(self, slots: Tensor, length: int) -> list[Tensor]:
        """Indices among the encoded entries of each segment of those at `slots [B, H, K]`."""
        assert self.encoded is not None
        seen, lengths = self.view(), self.encoded.lengths
        found = zip(slots.flatten(0, 1), lengths, strict=True)
        indices = [at - (length - seen.length(i)) for i, (at, _) in enumerate(found)]
        return [at[(at >= 0) & (at < n)] for at, n in zip(indices, lengths, strict=True)]

    @property
    def own_length(self) -> int:
        """Entries of every segment that were appended after the fork; 0 if this is no fork."""
        return self.tail.own.length if isinstance(self.tail, SharedBuffer) else 0

    def keep_own(self, slots: Tensor) -> None:
        """Evicts all of a fork's own entries but those at `slots [B, H, K]`; shared ones stay."""
        assert isinstance(self.tail, SharedBuffer)
        self.tail.keep_own(slots)

    def due(self, count: Callable[[int, int], int], more: int = 0) -> list[int]:
        """Entries of each segment to encode once its tail has `more`.

        They are `count(entries, encoded)` less those that are encoded.
        """
        encoded = [0] * len(self.gaps) if self.encoded is None else self.encoded.lengths
        sizes, tail = list(zip(encoded, self.gaps, strict=True)), self.tail.length + more
        # Segments of equal sizes share one call: this runs at every step.
        new = {(n, gap): count(n + tail - gap, n) - n for n, gap in {*sizes}}
        return [new[size] for size in sizes]

    def oldest(self, counts: Sequence[int]) -> list[Tensor]:
        """Each segment's `counts[i]` oldest tail entries, `[n, D]`."""
        rows = self.tail.rows
        heads = rows.shape[1]
        return [
            rows[i // heads, i % heads, gap : gap + n]
            for i, (n, gap) in enumerate(zip(counts, self.gaps, strict=True))
        ]

    def unencoded(
        self, columns: Tensor, place: Callable[[Tensor], Tensor] | None = None
    ) -> Unencoded:
        """The tail's entries, and their places among the `columns [B, H, T]` of all entries.

        `place` gives the positions of columns; None: the columns.
        """
        positions = (columns if place is None else place(columns)).flatten(0, 1)
        rows = zip(positions, self.alive, strict=True)
        return Unencoded(self.oldest(self.alive), [row[len(row) - n :] for row, n in rows])

    def begin_beside(self, old: Part) -> None:
        """Lets entries that are encoded from now on share what the encoded ones of `old` share."""
        if isinstance(old.encoded, Standalone):
            nothing = torch.arange(0, device=self.tail.rows.device)
            self.encoded = old.encoded.kept([nothing] * len(self.gaps))

    def accept(self, new: Encoded) -> None:
        """Moves the entries that were due from the tail to the encoded ones; `new` encodes them."""
        self.become(new if self.encoded is None else self.encoded.extended(new))

    def become(self, encoded: Encoded) -> None:
        """Replaces the encoded entries by `encoded`; drops from the tail those it includes."""
        seen = self.view()
        alive = [seen.length(i) - length for i, length in enumerate(encoded.lengths)]
        width, rows = max(alive), self.tail.rows
        self.tail = GrowingBuffer(rows[:, :, rows.shape[2] - width :], ROOM)
        self.gaps = tuple(width - count for count in alive)
        self.encoded = encoded

    def index(self, rows: Callable[[Tensor], Tensor], segments: list[int]) -> None:
        """Applies `rows`, a copying selection along the batch axis that selects `segments`."""
        self.tail.index(rows)
        self.gaps = tuple(self.gaps[i] for i in segments)
        if self.encoded is not None:
            self.encoded = self.encoded.select(segments)

    def nbytes(self, counted: set[int]) -> tuple[int, int]:
        """Bytes of the entries and of slack; skips and extends `counted`, as `Store.nbytes`."""
        used, room = self.tail.nbytes()
        stored = sum(self.alive) * self.tail.rows.shape[-1] * self.tail.rows.element_size()
        slack = room + used - stored
        encoded = [] if self.encoded is None else self.encoded.tensors()
        return stored + uncounted(encoded, counted), slack

    def cold_bytes(self) -> ColdBytes:
        """Bytes of cold entries, beside those of `nbytes`."""
        return self.encoded.cold.nbytes() if isinstance(self.encoded, Recalled) else ColdBytes()

    def nbytes_per_row(self, counted: set[int]) -> list[float]:
        """Bytes of each row as if it were alone; see `Store.nbytes_per_row`."""
        heads = self.tail.rows.shape[1]
        of_segments = _views(self.encoded) if self.encoded is not None else [()] * len(self.gaps)
        found = []
        for first in range(0, len(self.gaps), heads):
            own = slice(first, first + heads)
            encoded = [each for views in of_segments[own] for each in views]
            tail = self.tail.nbytes_alone(min(self.gaps[own]))
            found.append(tail + uncounted(encoded, counted))
        return found


def _views(encoded: Encoded) -> list[tuple[Tensor, ...]]:
    """Views of the tensors of `encoded`, those of each segment together."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in encoded.tensors()}
    # What files hold beside them, such as a table of centroids, is no tensor of the cache.
    views = (
        of_segments
        for of_segments in encoded.named().values()
        if of_segments[0].untyped_storage().data_ptr() in owned
    )
    return list(zip(*views, strict=True))


def uncounted(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Bytes of the tensors whose addresses are not in `counted`, to which they are added."""
    found = 0
    for tensor in tensors:
        # An empty view has the address of the one that follows it.
        if tensor.numel() and tensor.data_ptr() not in counted:
            counted.add(tensor.data_ptr())
            found += tensor.numel() * tensor.element_size()
    return found


def divided(slots: Tensor, counts: list[int], old: list[int]) -> tuple[Tensor, Tensor]:
    """Slots `[B, H, K]` of each segment's oldest entries, and of the newer ones; holes on the left.

    Segment i has `counts[i]` entries; its oldest `old[i]` are in the first result.
    """
    width = slots.shape[-1]
    new = torch.tensor([n - m for n, m in zip(counts, old, strict=True)], device=slots.device)
    new = new.view(*slots.shape[:2], 1)
    index = torch.arange(width, device=slots.device)
    newest = slots.masked_fill(index < width - new, -1)
    # The oldest move to the right end, where the newest were.
    oldest = pick(slots, index - new, -1)
    return oldest, newest
