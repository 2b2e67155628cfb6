# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Forced, LastQueries, Measured, Method, Needs, Stages, register
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.tolerance import fewest_within
from kvfold.methods.stages.score.observation_window import check_window
from kvfold.methods.stages.score.output_error import change_alone, relative_change


@register(
    "auto",
    paper="",
    formula="""
        s[h, t] = max_{u near t} √( Σ_{q in h, i in window} A[q, i, u]²·‖v[h, u] − o[q, i]‖² )
        kept = the fewest best with ‖o(kept) − o‖ ≤ tolerance·‖o‖ over all heads and the window
    """,
)
@dataclass(frozen=True)
class Auto(Method):
    """No budget: the fewest entries that keep each layer's attention output within a tolerance.

    1. The last `window` queries stand for future ones. Evicting an entry of weight a and value v
       moves their output o by about a·‖v − o‖. This change, max-pooled over `kernel` neighbours,
       ranks the entries of all heads together.
    2. Bisection finds the fewest entries for which the layer's output for these queries changes by
       at most `tolerance` of its norm. That change is the predicted error.
    3. Each head keeps its entries among these. The first `sinks` tokens and the window always stay.

    `measure` holds out `window` older queries, which play no part in the choice, and reports the
    error for them too. kvfold's own method; docs/auto.md compares both errors.
    """

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    tolerance: float = 0.05  # largest relative change of a layer's attention output
    window: int = 32  # last queries, for which the output is compared; their entries stay
    kernel: int = 7  # neighbours that changes are max-pooled over, odd
    sinks: int = 4  # first tokens that stay
    measure: bool = False  # also reports the error for as many older queries

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise KvfoldError(f"auto:tolerance is a positive part, not {self.tolerance}")
        check_window(self.window, self.kernel)
        self.check_range(0, None, "sinks")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.window * (2 if self.measure else 1))),
            score=partial(change_alone, window=self.window, kernel=self.kernel),
            allocate=Measured(
                partial(
                    fewest_within,
                    tolerance=self.tolerance,
                    window=self.window,
                    kernel=self.kernel,
                    sinks=self.sinks,
                ),
                error=self._errors,
                per_head=True,
            ),
            forced=Forced(sinks=self.sinks, recent=self.window),
        )

    def _errors(self, observation: Observation, kept: Tensor) -> Tensor:
        """Predicted error and, with `measure`, the measured one: `[B, 1 or 2]`."""
        newest = relative_change(observation, kept, slice(-self.window, None))
        if not self.measure:
            return newest[:, None]
        older = relative_change(observation, kept, slice(None, -self.window))
        return torch.stack([newest, older], -1)
