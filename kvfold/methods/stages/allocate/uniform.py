# SPDX-License-Identifier: Apache-2.0
"""Uniform allocation: the same size for every layer."""

from kvfold.errors import BudgetError
from kvfold.methods.stages.allocate.rounding import largest_remainder


def uniform(total: int, seen: int, layers: int) -> list[int]:
    """Sizes of the layers, as equal as integers allow; their sum is `total`. `seen` is not used."""
    return largest_remainder([total / layers] * layers, total)


def uniform_with_skipped(total: int, seen: int, layers: int, skipped: tuple[int, ...]) -> list[int]:
    """Sizes of the layers: `skipped` ones keep all `seen` tokens, the others share the rest.

    Raises BudgetError if the skipped layers exceed `total`.
    """
    rest = [layer for layer in range(layers) if layer not in skipped]
    whole = layers - len(rest)
    if not rest or total < whole * seen:
        raise BudgetError(
            f"{whole} whole layers of {seen} tokens take {whole * seen} entries per KV head, "
            f"the budget is {total}: raise it or skip fewer layers"
        )
    shared = iter(uniform(total - whole * seen, seen, len(rest)))
    return [seen if layer in skipped else next(shared) for layer in range(layers)]
