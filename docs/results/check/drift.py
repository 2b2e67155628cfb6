# SPDX-License-Identifier: Apache-2.0
"""False alarms of the test behind `kvfold serve --shadow`, and how soon it sees a drift:

    python -m docs.results.check.drift

Prints the rows of docs/results/check/drift.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvfold.evidence.sequential import SequentialTest

Losses = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, float, int], Losses]

TOLERANCE, ERROR = 0.05, 0.1
RUNS, SAMPLES, AFTER = 1000, 2000, 1000


def _small_with_failures(rng: np.random.Generator, mean: float, count: int) -> Losses:
    """Six tenths of the mean come from answers that fail completely."""
    failing = 0.6 * mean
    small = rng.random(count) * 2 * (mean - failing) / (1 - failing)
    return np.where(rng.random(count) < failing, 1.0, small)


# Losses in [0, 1] of any mean.
DRAWS: dict[str, Draw] = {
    "some answers fail": lambda rng, mean, n: (rng.random(n) < mean).astype(float),
    "a long tail": lambda rng, mean, n: rng.beta(0.5, 0.5 * (1 - mean) / mean, n),
    "all alike": lambda rng, mean, n: rng.beta(4.0, 4 * (1 - mean) / mean, n),
    "small, some fail": _small_with_failures,
}


def seen(losses: Losses) -> int | None:
    """The number of losses after which the test rejects, None if it never does."""
    test = SequentialTest.of(TOLERANCE, ERROR)
    for count, loss in enumerate(losses, 1):
        test = test.after(float(loss))
        if test.rejected:
            return count
    return None


def false_alarms(draw: Draw, runs: int, samples: int) -> float:
    """Part of the runs that reject a mean that is the tolerance, looked at after each sample."""
    rng = np.random.default_rng(0)
    found = [seen(draw(rng, TOLERANCE, samples)) for _ in range(runs)]
    return sum(each is not None for each in found) / runs


def delays(draw: Draw, before: int, runs: int) -> list[int]:
    """Samples from a jump of the mean, half the tolerance to three times it, to the rejection.

    Runs that reject `before` it are left out; one that does not see it counts as 1,000.
    """
    rng = np.random.default_rng(1)
    found = []
    for _ in range(runs):
        losses = (draw(rng, TOLERANCE / 2, before), draw(rng, 3 * TOLERANCE, AFTER))
        at = seen(np.concatenate(losses))
        if at is None or at > before:
            found.append(AFTER if at is None else at - before)
    return found


def main() -> None:
    print("| losses | false alarms | seen after 0 good ones | after 200 | after 1,000 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, draw in DRAWS.items():
        shown = [f"{false_alarms(draw, RUNS, SAMPLES):.3f}"]
        for before in (0, 200, 1000):
            middle, late = np.quantile(delays(draw, before, RUNS // 2), (0.5, 0.95))
            shown.append(f"{middle:.0f} ({late:.0f})")
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
