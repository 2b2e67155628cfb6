# SPDX-License-Identifier: Apache-2.0
"""Tracking of a forward that has begun and not returned: nothing may be read after it failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvfold.cache.barrier import Barrier
from kvfold.cache.observe import judged
from kvfold.cache.prefill import bring_to_budget
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.kernels.full_precision import full_precision


@dataclass
class OpenForward:
    """The forward that is running, or that failed."""

    begun: int | None = None  # columns seen before it; None while no forward is open
    states_moved: bool = False  # True if recurrent layers have read its tokens: no crop undoes that

    def begin(self, seen: int, is_level: Callable[[], bool]) -> None:
        """A forward begins at `seen` columns; `is_level` says whether all layers have stored them.

        Raises KvfoldError where the last one failed when layers had taken in its tokens.
        """
        if self.states_moved:
            raise KvfoldError(
                "the last forward failed after recurrent layers had read its tokens, which they "
                "cannot give back: make a new cache, or go back with cache.crop to where a "
                "`with cache.frozen():` block began"
            )
        new = 0 if self.begun is None else seen - self.begun
        # A forward that failed between layers left them at different lengths: refused elsewhere.
        if new > 0 and is_level():
            raise KvfoldError(
                f"the last forward failed after all layers had stored its {new} tokens: take them "
                f"back with cache.crop({-new}) before they are read again, or make a new cache"
            )
        self.begun = seen

    def fail(self, seen: int) -> None:
        """Notes that a forward that began at `seen` columns stored tokens and then failed."""
        self.begun = seen

    def go_back(self, to_start: bool) -> None:
        """Notes a crop; `to_start` of a `frozen()` block, whose recurrent states are put back."""
        self.states_moved &= not to_start

    def move_states(self) -> None:
        """Notes that a recurrent layer has read tokens."""
        self.states_moved = self.begun is not None

    def stored_nothing(self) -> UnsupportedModel:
        """Error for a forward that has returned where it began; it is over."""
        self.close()
        return UnsupportedModel(
            "the model read these tokens and stored none of them, as transformers has it under "
            "gradient checkpointing in training: call model.eval() to read with a cache"
        )

    def close(self) -> None:
        """Notes that the forward is over."""
        self.begun, self.states_moved = None, False


@full_precision
@torch.no_grad()
def evict_judged(barrier: Barrier[LayerState]) -> None:
    """Evicts the layers that waited for the logits of a forward, which has returned."""
    for state, observation in barrier.unjudged.take():
        bring_to_budget(state, judged(state, observation))
