# SPDX-License-Identifier: Apache-2.0
"""Cost of a piece of work: its seconds, and its operations from the shapes of its products."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from kvfold.bench.clock import synchronize

SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Cost:
    """Wall-clock seconds, and multiplications and additions of matrix products.

    `operations` are counted as torch's FlopCounterMode does: two per multiply-add, masked products
    included. They are None on a GPU, whose kernels do not show theirs.
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
    began = time.perf_counter()
    try:
        if device.type != "cpu":
            yield cost
        else:
            with FlopCounterMode(display=False, custom_mapping={SDPA_ON_CPU: _sdpa}) as counter:
                yield cost
    finally:
        synchronize(device)
        cost.seconds = time.perf_counter() - began
        cost.operations = None if counter is None else counter.get_total_flops()


class StepCost:
    """Stopping criterion that never stops, and measures the second forward; `cost` if it came."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cost: Cost | None = None
        self._step = ExitStack()
        self._measured: Cost | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """False `[B]`; called after each token."""
        if self._measured is None:
            self._measured = self._step.enter_context(measured(self.device))
        elif self.cost is None:
            self.close()
            self.cost = self._measured
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def close(self) -> None:
        """Ends the measurement of a forward that never came."""
        self._step.close()


def _sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of torch's fused attention on CPUs, which its counter does not know."""
    return int(sdpa_flop_count(query, key, value))
