# SPDX-License-Identifier: Apache-2.0
"""The `Store` of a layer's entries: one interface over rectangles and ragged heads.

Shapes: keys `[B, H, T, D]`, values `[B, H, T, Dv]`, columns `[B, H, T]`. Heads that hold fewer than
T entries are filled up on the left, with column −1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvfold.kernels.views import Named


class Store(ABC):
    """Entries of one layer: what all stores offer.

    `DenseStore` can also drop, change and place single entries; `RaggedStore` can encode its oldest
    ones. Code that needs this asks a `LayerState` for its `dense()` or its `ragged()` store.

    Methods that modify: `append`, `keep`, `keep_own`, `crop`, `index`. After `keep` and `crop`
    earlier views stay as they were; `index` copies. `fork` and `view` share: nothing is copied.
    """

    kind: ClassVar[Literal["dense", "segments"]]  # in context files
    is_dense: ClassVar[bool]  # one rectangle, which the model's own attention can read
    dead: int = 0  # evicted entries of each head that still take room
    holes: bool = False  # whether any column is −1

    @property
    def moved(self) -> bool:
        """Whether entry i may be another column than i."""
        return True

    @property
    def crowded(self) -> bool:
        """Whether so much is dead that a copy is due."""
        return False

    @property
    def pairs(self) -> bool:
        """Whether entries are shared with another layer's."""
        return False

    @property
    def new(self) -> tuple[int, int]:
        """How many entries came since the last eviction, and the first one's column."""
        return 0, 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Entries of the longest head."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """Raw keys `[B, H, T, D]`: all of a dense store, the newest ones of a ragged store."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values of the same entries."""

    @property
    @abstractmethod
    def positions(self) -> Tensor:
        """Columns of the logical sequence `[B, H, T]`, int64, ascending; −1 for holes."""

    @property
    def fixed(self) -> Tensor | None:
        """Entries `[B, H, T]` that cannot be evicted, since they are quantized; None: none are."""
        return None

    @abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all entries, decoded."""

    @abstractmethod
    def view(self) -> Any:
        """What attention reads beside keys and values; it stays as it is when the store goes on."""

    @abstractmethod
    def fork(self) -> Store:
        """A store that goes on by itself and shares all that is stored."""

    @abstractmethod
    def named(self) -> Named:
        """All tensors by name, as views: one for each row's KV head."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Adds entries `[B, H, S, D]`, in columns from `first` on; returns `keys` and `values`."""

    @abstractmethod
    def keep(self, slots: Tensor) -> None:
        """Keeps the entries at `slots [B, H, K]`, ascending, −1 for holes; frees the others."""

    @property
    @abstractmethod
    def own(self) -> int:
        """Entries of each head that came after those that a fork shares."""

    @abstractmethod
    def keep_own(self, slots: Tensor) -> None:
        """Of a fork's own entries keeps those at `slots [B, H, K]`; what is shared stays."""

    @abstractmethod
    def crop(self, count: int) -> None:
        """Drops the last `count` entries of every head."""

    @abstractmethod
    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to everything stored."""

    @abstractmethod
    def nbytes(self, counted: set[int]) -> tuple[int, int, int]:
        """Bytes of keys and values, of what lies beside them, and of slack.

        Tensors whose address is in `counted` were counted before; those of this store are added.
        """
