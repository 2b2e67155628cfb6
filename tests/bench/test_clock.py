# SPDX-License-Identifier: Apache-2.0
"""Stopwatches: time counts once, and compression apart from prefill."""

from __future__ import annotations

import pytest
import torch

from kvfold.bench.clock import Stopwatch, compression_watched
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import FullParticipant, MethodParticipant
from kvfold.bench.sdpa_variants import SdpaChoice
from kvfold.cache.layer import CompressedLayer


def test_time_inside_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(moments)))
    watch = Stopwatch(torch.device("cpu"))
    inner = watch.watched(lambda: None)
    outer = watch.watched(lambda: [inner(), inner()])
    outer()
    inner()
    assert watch.total() == 2.0


def test_compression_is_told_from_prefill(subject: BenchModel) -> None:
    before = (CompressedLayer.finish, CompressedLayer.end_reading)
    ids = subject.tokens(1, 80)
    full = FullParticipant(subject, SdpaChoice()).prefill(ids, 1)
    assert full.compression == 0.0
    for method in ("snapkv", "kvzip"):
        taken = MethodParticipant(subject, method, "0.5").prefill(ids, 1)
        assert 0 < taken.compression < taken.seconds
    assert (CompressedLayer.finish, CompressedLayer.end_reading) == before


def test_what_is_watched_is_restored_after_an_error() -> None:
    before = CompressedLayer.finish
    with pytest.raises(RuntimeError), compression_watched(torch.device("cpu")):
        raise RuntimeError
    assert CompressedLayer.finish is before
