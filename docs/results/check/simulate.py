# SPDX-License-Identifier: Apache-2.0
"""How often a bound of `kvfold check` is below the true mean, by simulation:

    python -m docs.results.check.simulate

Prints the rows of docs/results/check/bounds.md: 20,000 runs of each distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import beta

from kvfold.evidence.bounds import upper_bound

RUNS, BLOCK = 20_000, 1000
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray[Any, Any]]

# Losses in [0, 1], and their mean.
LOSSES: dict[str, tuple[Draw, float]] = {
    "1 in 20 prompts fails": (lambda rng, shape: (rng.random(shape) < 0.05).astype(float), 0.05),
    "half of all fail": (lambda rng, shape: (rng.random(shape) < 0.5).astype(float), 0.5),
    "1 in 500 fails": (lambda rng, shape: (rng.random(shape) < 0.002).astype(float), 0.002),
    "small, a long tail": (lambda rng, shape: rng.beta(0.2, 5.0, shape), 0.2 / 5.2),
    "small, 1 in 100 fails": (
        lambda rng, shape: np.where(rng.random(shape) < 0.01, 1.0, rng.random(shape) * 0.02),
        0.01 + 0.99 * 0.01,
    ),
}


def main() -> None:
    print("| losses | mean | error | prompts | mean above the bound (95 %) | median bound |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (draw, mean) in LOSSES.items():
        for error in (0.1, 0.05):
            for samples in (50, 100, 400):
                rng = np.random.default_rng(samples)
                bounds = np.concatenate(
                    [upper_bound(draw(rng, (BLOCK, samples)), error) for _ in range(RUNS // BLOCK)]
                )
                failed = int((bounds < mean).sum())
                low, high = (
                    beta.ppf(0.025, failed, RUNS - failed + 1) if failed else 0.0,
                    beta.ppf(0.975, failed + 1, RUNS - failed),
                )
                print(
                    f"| {name} | {mean:.3f} | {error:g} | {samples} | {failed / RUNS:.3f} "
                    f"({low:.3f} to {high:.3f}) | {np.median(bounds):.3f} |"
                )


if __name__ == "__main__":
    main()
