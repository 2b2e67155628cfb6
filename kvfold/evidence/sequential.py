# SPDX-License-Identifier: Apache-2.0
"""A test that a mean loss is low enough, which may be looked at after every sample.

By betting: Waudby-Smith & Ramdas, arXiv 2010.09686, section 4, with their aGRAPA bets, from
estimates that forget, so that a change is seen soon after long good times, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MEMORY = 50  # samples that the estimates behind a bet go back
BOLDEST = 0.5  # part of the wealth that a sample may cost


@dataclass(frozen=True)
class SequentialTest:
    """Test that the mean of losses in [0, 1] is at most `tolerance`, after `samples` of them.

    A gambler who begins with 1 bets on losses above the tolerance. Whatever the distributions: if
    the mean of each sample, given those before it, is within the tolerance, the wealth ever reaches
    1 / `error` with a probability of at most `error` (Ville's inequality). There it is rejected,
    for good. `expected` and `spread` estimate mean and variance of the losses to come.
    """

    tolerance: float
    error: float
    expected: float
    spread: float
    samples: int = 0
    total: float = 0.0
    log_wealth: float = 0.0
    rejected: bool = False

    @classmethod
    def of(cls, tolerance: float, error: float) -> SequentialTest:
        """The test before its first sample; both numbers lie between 0 and 1."""
        return cls(tolerance, error, expected=tolerance, spread=tolerance * (1 - tolerance))

    @property
    def mean(self) -> float:
        """Mean of all samples; 0 before the first."""
        return self.total / max(1, self.samples)

    @property
    def stake(self) -> float:
        """Part of the wealth that is bet, for each unit of the next loss above the tolerance."""
        above = self.expected - self.tolerance
        if above <= 0:
            return 0.0
        return min(BOLDEST / self.tolerance, above / (self.spread + above**2))

    def after(self, loss: float) -> SequentialTest:
        """The test after one more loss, on which `stake` was bet before it was known."""
        log_wealth = self.log_wealth + math.log1p(self.stake * (loss - self.tolerance))
        off, newest = loss - self.expected, 1 / min(self.samples + 2, MEMORY)
        return replace(
            self,
            expected=self.expected + newest * off,
            spread=(1 - newest) * (self.spread + newest * off**2),
            samples=self.samples + 1,
            total=self.total + loss,
            log_wealth=log_wealth,
            rejected=self.rejected or log_wealth >= -math.log(self.error),
        )
