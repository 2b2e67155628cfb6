# SPDX-License-Identifier: Apache-2.0
"""Layers that an option names, counted from the first layer or from the last."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.errors import KvfoldError


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
