# SPDX-License-Identifier: Apache-2.0
"""Cost of a piece of work: its seconds, and its operations from the shapes of its products."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from kvfold.kernels.native.library import operations_so_far
from kvfold.measure.clock import synchronize

SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Cost:
    """Wall-clock seconds, and multiplications and additions of matrix products.

    `operations` are counted as torch's FlopCounterMode does: two per multiply-add, masked products
    of fused attention included; those of kvfold's C++ are added. They are None on a GPU, whose
    kernels do not show theirs.
    """

    seconds: float = 0.0
    operations: int | None = None

    def __add__(self, other: Cost) -> Cost:
        both = self.operations is not None and other.operations is not None
        counted = (self.operations or 0) + (other.operations or 0) if both else None
        return Cost(self.seconds + other.seconds, counted)


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """The cost of the block, known when it ends, after an exception too."""
    cost, counter = Cost(), None
    synchronize(device)
    before, began = operations_so_far(), time.perf_counter()
    try:
        if device.type != "cpu":
            yield cost
        else:
            with FlopCounterMode(display=False, custom_mapping={SDPA_ON_CPU: _sdpa}) as counter:
                yield cost
    finally:
        synchronize(device)
        cost.seconds = time.perf_counter() - began
        if counter is not None:
            cost.operations = counter.get_total_flops() + operations_so_far() - before


class ForwardCost:
    """Stopping criterion that never stops, and measures the forward of one generated token.

    Token 0 is the prefill's, which begins where the `with` block does. `cost` is None until the
    token has come.
    """

    def __init__(self, device: torch.device, token: int) -> None:
        self.device, self.token = device, token
        self.cost: Cost | None = None
        self._seen = 0
        self._forward = ExitStack()
        self._measured: Cost | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *raised: object) -> None:
        self._forward.close()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """False `[B]`; called after each token."""
        if self._seen == self.token:
            self._forward.close()
            self.cost = self._measured
        self._seen += 1
        self._begin()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _begin(self) -> None:
        if self._seen == self.token:
            self._measured = self._forward.enter_context(measured(self.device))


def _sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of torch's fused attention on CPUs, which its counter does not know."""
    return int(sdpa_flop_count(query, key, value))
