# SPDX-License-Identifier: Apache-2.0
"""Stopwatches: time counts once, and compression apart from prefill."""

from __future__ import annotations

import pytest
import torch

from kvfold.cache.layer import CompressedLayer
from kvfold.measure.clock import Stopwatch, compression_watched


def test_time_inside_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(moments)))
    watch = Stopwatch(torch.device("cpu"))
    inner = watch.watched(lambda: None)
    outer = watch.watched(lambda: [inner(), inner()])
    outer()
    inner()
    assert watch.total() == 2.0


def test_what_is_watched_is_restored_after_an_error() -> None:
    before = CompressedLayer.finish
    with pytest.raises(RuntimeError), compression_watched(torch.device("cpu")):
        raise RuntimeError
    assert CompressedLayer.finish is before
