# SPDX-License-Identifier: Apache-2.0
"""How time is taken: of one piece of work, and of the compression inside it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.cache.layer import CompressedLayer


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long `work` takes, with all it started on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


class Stopwatch:
    """Adds up the time inside the functions it watches; one called inside another counts once.

    On a GPU it marks the stream with events instead of waiting, so that watching costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running = False
        self._spans: list[tuple[Any, Any]] = []

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time taken."""

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
        """Seconds so far; the device must be idle."""
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
    """Times all that kvfold does to a layer once its attention is computed, and KVzip's repeating.

    What a method observes inside attention (column sums) is the prefill's, not compression's.
    """
    watch = Stopwatch(device)
    # The package's name `kvfold.generate` is the function.
    generating = importlib.import_module("kvfold.generation.generate")
    places = [(CompressedLayer, "finish"), (CompressedLayer, "end_turn"), (generating, "rebuild")]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, watch.watched(function))
    try:
        yield watch
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)
