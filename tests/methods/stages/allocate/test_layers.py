# SPDX-License-Identifier: Apache-2.0
"""Layers that an option names: from the first or the last one, and none beyond them."""

from __future__ import annotations

import pytest

from kvfold import KvfoldError
from kvfold.methods.stages.allocate.uniform import named_layers


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_each_layer_has_two_numbers(layers: int) -> None:
    for index, from_end in zip(range(layers), range(-layers, 0), strict=True):
        assert named_layers((index,), layers, "a") == named_layers((from_end,), layers, "a")
        assert named_layers((from_end, index), layers, "a") == {index}
    assert named_layers((), layers, "a") == set()


@pytest.mark.parametrize("layer", [4, 99, -5])
def test_a_layer_that_there_is_not_is_refused(layer: int) -> None:
    with pytest.raises(KvfoldError, match=rf"a:b names layer {layer} of 4 .* 0 to 3.* -1 to -4"):
        named_layers((0, layer), 4, "a:b")
