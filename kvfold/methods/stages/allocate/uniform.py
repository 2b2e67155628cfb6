# SPDX-License-Identifier: Apache-2.0
"""The same for every layer."""

from kvfold.errors import BudgetError
from kvfold.methods.stages.allocate.rounding import largest_remainder


def uniform(total: int, seen: int, layers: int) -> list[int]:
    """`total` entries over `layers` layers as evenly as integers allow, whatever was `seen`."""
    return largest_remainder([total / layers] * layers, total)


def uniform_with_skipped(total: int, seen: int, layers: int, skipped: tuple[int, ...]) -> list[int]:
    """`skipped` layers stay whole, the others share what is left of `total`."""
    rest = [layer for layer in range(layers) if layer not in skipped]
    whole = layers - len(rest)
    if not rest or total < whole * seen:
        raise BudgetError(
            f"{whole} whole layers of {seen} tokens take {whole * seen} entries per KV head, "
            f"the budget is {total}: raise it or skip fewer layers"
        )
    shared = iter(uniform(total - whole * seen, seen, len(rest)))
    return [seen if layer in skipped else next(shared) for layer in range(layers)]
