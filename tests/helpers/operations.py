# SPDX-License-Identifier: Apache-2.0
"""Operations on tensors as they run: their count, and the largest tensor that they make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Operations(TorchDispatchMode):
    """Counts operations: those of matrix products and attention as `FlopCounterMode` has them.

    Of everything else, which `FlopCounterMode` leaves out, each element that is written is one:
    rotations, gathers, copies, sorts, index arithmetic. Views write nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        product = flop_registry.get(func.overloadpacket)
        if product is not None:
            self.count += product(*args, **(kwargs or {}), out_val=out)
        elif not func.is_view:
            written = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            self.count += sum(tensor.numel() for tensor in written)
        return out


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out
