# SPDX-License-Identifier: Apache-2.0
"""Timing of a function call, and of the compression inside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.cache.layer import CompressedLayer
from kvfold.generation.readers import reconstruct as readers


def synchronize(device: torch.device) -> None:
    """Waits until all work queued on a GPU is done; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Wall-clock seconds of `work`, including all kernels it launched on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


class Stopwatch:
    """Total time spent inside the wrapped functions; a nested call is not counted twice.

    On a GPU, CUDA events mark the stream, so timing adds no synchronisation.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running = False
        self._spans: list[tuple[Any, Any]] = []

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, wrapped so that its time is added to the total."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running, began = True, self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._running = False
                self._spans.append((began, self._now()))

        return timed

    def total(self) -> float:
        """Total in seconds; the device must be idle."""
        if self._cuda:
            return float(sum(began.elapsed_time(ended) for began, ended in self._spans)) / 1000
        return float(sum(ended - began for began, ended in self._spans))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def compression_watched(device: torch.device) -> Iterator[Stopwatch]:
    """A stopwatch on kvfold's work after each layer's attention and on reconstruction (KVzip).

    Observations made inside attention, such as column sums, count as prefill, not as compression.
    """
    watch = Stopwatch(device)
    places = [
        (CompressedLayer, "finish"),
        (CompressedLayer, "end_reading"),
        (readers, "reconstruct"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, watch.watched(function))
    try:
        yield watch
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)
