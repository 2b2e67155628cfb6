# SPDX-License-Identifier: Apache-2.0
"""A forward that has begun and not returned: one that failed must not be read on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfold.errors import KvfoldError


@dataclass
class OpenForward:
    """`begun`: columns seen before it; None while no forward is open.

    `states_moved`: recurrent layers have read its tokens, which no crop takes back.
    """

    begun: int | None = None
    states_moved: bool = False

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

    def move_states(self) -> None:
        """A recurrent layer has read tokens."""
        self.states_moved = self.begun is not None

    def close(self) -> None:
        """It has returned."""
        self.begun, self.states_moved = None, False
