# SPDX-License-Identifier: Apache-2.0
"""The phase a cache is in: prefill, decode, frozen, reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfold.methods.observation import Observation

Step = Literal["prefill", "prefill end", "decode"]


@dataclass(frozen=True)
class ReconstructionForward:
    """A forward that repeats part of a context of `text` columns (KVzip).

    `scored [B, N]` are the columns, new ones included, among which its attention is shared out.
    """

    text: int
    scored: Tensor


@dataclass
class Phase:
    """Flags shared by all layers of a cache.

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

    def step(self, seen: int, new: int) -> Step:
        """Step of a forward of `new` tokens that reached `seen` columns."""
        if self.reading or seen < self.until:
            return "prefill"
        return "prefill end" if new > 1 or seen - new < self.until else "decode"

    def in_prefill(self, seen: int) -> bool:
        """True if more pieces of this prefill follow after `seen` columns."""
        return self.reading or seen < self.until

    def reset(self) -> None:
        """As before the first token."""
        self.reading = self.frozen = self.layerwise = False
        self.until = 0
        self.repeating = self.observed = self.prefix = None
