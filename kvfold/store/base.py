# SPDX-License-Identifier: Apache-2.0
"""`Store`: the interface of a layer's entries, for dense and ragged heads alike.

Shapes: keys `[B, H, T, D]`, values `[B, H, T, Dv]`, columns `[B, H, T]`. Heads that hold fewer than
T entries are padded on the left, with column −1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvfold.kernels.cold_bytes import ColdBytes
from kvfold.kernels.views import Named


class Store(ABC):
    """Interface of one layer's entries.

    `DenseStore` can also drop, change and place single entries; `RaggedStore` can encode its oldest
    ones. Code that needs this asks a `LayerState` for its `dense_store()` or its `ragged_store()`.

    Modify the store: `append`, `keep`, `crop`, `index`, `set_bias`. Views taken before
    `keep` and `crop` stay valid; `index` copies. `fork` and `view` share memory: nothing is copied.
    """

    kind: ClassVar[Literal["dense", "segments"]]  # in context files
    is_dense: ClassVar[bool]  # one rectangle, which the model's own attention can read
    dead: int = 0  # evicted entries of each head that still occupy a slot
    holes: bool = False  # True if any slot is a hole
    biased: bool = False  # True if entries have an attention bias

    @property
    def pairs(self) -> bool:
        """True if two layers share their entries' directions (MiniCache)."""
        return False

    @property
    def encoded(self) -> bool:
        """True if entries are encoded, so that what is kept of them cannot be changed."""
        return False

    @property
    def bias(self) -> Tensor | None:
        """Additive attention bias of the entries `[B, H, T]`, float32; None: no entry has one."""
        return None

    @property
    def new(self) -> tuple[int, int]:
        """Number of entries appended since the last eviction, and the column of the first."""
        return 0, 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Entries of the longest head."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """Raw keys `[B, H, T, D]`: all keys of a dense store, the tail of a ragged store."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """Raw values `[B, H, T, Dv]` of the same entries."""

    @property
    @abstractmethod
    def columns(self) -> Tensor:
        """Columns of all entries `[B, H, T]`, int64, ascending; −1 for holes."""

    @property
    def fixed(self) -> Tensor | None:
        """Bool mask `[B, H, T]` of encoded entries, which cannot be evicted; None: none."""
        return None

    @abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys `[B, H, T, D]` and values `[B, H, T, Dv]` of all entries, decoded."""

    @abstractmethod
    def view(self) -> Any:
        """Data that attention needs besides keys and values; a later append does not change it."""

    @abstractmethod
    def fork(self) -> Store:
        """A store that shares all present entries and grows by itself."""

    @abstractmethod
    def unshare(self) -> None:
        """Copies the entries that it still shares with the store that it was forked from."""

    @abstractmethod
    def named(self) -> Named:
        """All tensors by name, as views, one for each row's KV head; for context files."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Appends entries `[B, H, S, D]` of columns from `first` on; returns `keys` and `values`.

        Raises KvfoldError outside `torch.inference_mode()` if the store was made inside of it.
        """

    @abstractmethod
    def set_bias(self, bias: Tensor) -> None:
        """Adds `bias [B, H, T]` to the logits of the entries, in place of an earlier one.

        It moves with its entry, and that of entries to come is 0. Earlier views stay valid.
        """

    @abstractmethod
    def keep(self, slots: Tensor) -> None:
        """Evicts all entries but those at `slots [B, H, K]`, ascending, −1 for holes.

        Of a fork with entries of its own, all slots that it shares are among them.
        """

    @property
    @abstractmethod
    def own_length(self) -> int:
        """Entries of each head that were appended after the fork; 0 if this is no fork."""

    @abstractmethod
    def crop(self, count: int) -> None:
        """Drops the last `count` entries of every head."""

    @abstractmethod
    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to all tensors."""

    @abstractmethod
    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of data besides them (columns, masks, biases), and of slack.

        `counted` holds addresses of shared tensors that were counted before; this store's are
        added to it.
        """

    def cold_bytes(self) -> ColdBytes:
        """Bytes of cold entries, which `nbytes` does not count."""
        return ColdBytes()

    @abstractmethod
    def nbytes_per_row(
        self, kept: Sequence[Sequence[int]], whole: Sequence[bool], counted: set[int]
    ) -> list[float]:
        """Bytes of each row of the batch as if it were alone: without what other rows make it hold.

        `kept[b][h]` are the entries of row b's head h, padding left out. `whole` rows are those of
        which nothing was evicted: alone, their columns need not be stored. `counted` is that of
        `nbytes`, with addresses of parts of tensors.
        """
