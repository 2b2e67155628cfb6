# SPDX-License-Identifier: Apache-2.0
"""The phase a cache is in: prefill, decode, frozen, reconstruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.history import History
from kvfold.errors import KvfoldError
from kvfold.methods.observation import Observation

Step = Literal["prefill", "prefill end", "decode"]


@dataclass(frozen=True)
class ReconstructionForward:
    """A forward that repeats part of a context of `text` columns (KVzip).

    `scored [B, N]` are the columns, new ones included, among which its attention is shared out.
    `row_weights [B, S]` of its tokens, by compressed layer, multiply that attention, and so do the
    norms of projected values; there are none but in KVzip+. `rms` scores by the root of the mean
    square of attention, else by its maximum.
    """

    text: int
    scored: Tensor
    rms: bool = False
    row_weights: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Phase:
    """Flags and token ids shared by all layers of a cache.

    A prefill is any forward of more than one token, or several forwards inside
    `cache.reading()`; a method's eviction comes at its end.
    """

    reading: bool = False  # inside `with cache.reading():`
    until: int = 0  # tokens at which a prefill that is read in pieces ends
    frozen: bool = False  # nothing is evicted, and tokens can be cropped
    layerwise: bool = False  # layers run one by one, on fewer and fewer tokens (PyramidInfer)
    repeating: ReconstructionForward | None = None
    observed: Observation | None = None  # what the last layer of a layer-wise prefill saw
    prefix: Tensor | None = None  # [B], first tokens of each row that are kept beside the budget
    own_size: int | None = None  # entries per KV head to keep of a fork's own tokens; None: all
    history: History = field(default_factory=History)  # ids of all that was read
    incoming: Tensor | None = None  # ids [B, S] of the forward that runs, if a stage reads them

    def step(self, seen: int, new: int) -> Step:
        """Step of a forward of `new` tokens that reached `seen` columns."""
        if self.reading or seen < self.until:
            return "prefill"
        return "prefill end" if new > 1 or seen - new < self.until else "decode"

    def in_prefill(self, seen: int) -> bool:
        """True if more pieces of this prefill follow after `seen` columns."""
        return self.reading or seen < self.until

    def expect(self, ids: Tensor | None) -> None:
        """Notes the `ids [B, S]` of a forward that begins; KvfoldError for embeddings (None)."""
        if ids is None:
            raise KvfoldError(
                "this cache's method reads token ids, and inputs_embeds has none: give input_ids"
            )
        self.incoming = ids

    def ids(self, seen: int, device: torch.device) -> Tensor | None:
        """Token ids `[B, seen]` of all columns, int64, −1 where unknown; None if all are."""
        history = self.history
        if self.incoming is not None:
            history = history.plus(self.incoming, seen - self.incoming.shape[1])
        ids = history.whole()
        if ids is None:
            return None
        return F.pad(ids.long(), (0, seen - ids.shape[1]), value=-1).to(device)

    def crop(self, length: int) -> None:
        """Forgets the ids of columns from `length` on."""
        self.history, self.incoming = self.history.crop(length), None

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.history = self.history.index(rows)
        if self.prefix is not None:
            self.prefix = rows(self.prefix)

    def reset(self) -> None:
        """As before the first token."""
        self.reading = self.frozen = self.layerwise = False
        self.until = 0
        self.repeating = self.observed = self.prefix = self.incoming = None
        self.history = History()
