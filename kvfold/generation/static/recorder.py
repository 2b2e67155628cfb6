# SPDX-License-Identifier: Apache-2.0
"""Recorders of a decode step: CUDA's graph on a GPU; elsewhere the step itself runs each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Step = Callable[[], Any]


class Recorder(Protocol):
    """Runs a step over static tensors once as it is, and records it to be run again."""

    def warm_up(self, step: Step) -> Any:
        """What the step returns; compiles kernels and allocates workspaces."""

    def record(self, step: Step) -> Step:
        """A function that does what `step` does, at the same addresses; `step` does not take place.

        What it returns is overwritten by the next call.
        """


class Uncaptured:
    """Runs every step by the host, where there is nothing to capture."""

    def warm_up(self, step: Step) -> Any:
        return step()

    def record(self, step: Step) -> Step:
        return step


class CudaGraphs:
    """Captures a step as a CUDA graph of `device`, whose replay launches all kernels at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, step: Step) -> Any:
        with torch.cuda.device(self.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                out = step()
            current.wait_stream(side)
        return out

    def record(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            out = step()

        def replay() -> Any:
            graph.replay()
            return out

        return replay


def recorder_for(device: torch.device) -> Recorder:
    """The recorder of steps on `device`."""
    return CudaGraphs(device) if device.type == "cuda" else Uncaptured()
