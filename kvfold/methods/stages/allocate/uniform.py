# SPDX-License-Identifier: Apache-2.0
"""Uniform allocation: the same size for every layer."""

from kvfold.errors import BudgetError
from kvfold.methods.stages.allocate.layers import named_layers
from kvfold.methods.stages.allocate.rounding import largest_remainder


def uniform(total: int, seen: int, layers: int) -> list[int]:
    """Sizes of the layers, as equal as integers allow; their sum is `total`. `seen` is not used."""
    return largest_remainder([total / layers] * layers, total)


def uniform_with_skipped(
    total: int, seen: int, layers: int, skipped: tuple[int, ...], option: str = "skip_layers"
) -> list[int]:
    """Sizes of the layers: `skipped` ones keep all `seen` tokens, the others share the rest.

    Negative layers count from the end. Raises BudgetError if the skipped layers exceed `total`, and
    KvfoldError, naming the method's `option`, for a layer that there is not.
    """
    whole = named_layers(skipped, layers, option)
    rest = layers - len(whole)
    taken = len(whole) * seen
    if not rest or total < taken:
        raise BudgetError(
            f"{len(whole)} whole layers of {seen} tokens take {taken} entries per KV head, "
            f"the budget is {total}: raise it or skip fewer layers"
        )
    shared = iter(uniform(total - taken, seen, rest))
    return [seen if layer in whole else next(shared) for layer in range(layers)]
