# SPDX-License-Identifier: Apache-2.0
"""Uniform allocation: the same size for every layer, or for those that no option names."""

from collections.abc import Sequence

from kvfold.errors import BudgetError, KvfoldError
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


def named_layers(named: Sequence[int], layers: int, option: str) -> set[int]:
    """Indices from 0 of the layers that an `option` names, of all `layers`; −1 is the last.

    Raises KvfoldError, naming the option, for a layer that there is not.
    """
    for layer in named:
        if not -layers <= layer < layers:
            raise KvfoldError(
                f"{option} names layer {layer} of {layers} compressed layers: these are 0 to "
                f"{layers - 1}, or from the last one on -1 to {-layers}"
            )
    return {layer % layers for layer in named}
