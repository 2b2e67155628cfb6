# SPDX-License-Identifier: Apache-2.0
"""Fixtures of benchmarks: a tiny model, no peak measured, a stand-in for kvpress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig

from kvfold.bench import kvpress
from kvfold.bench import participants as sides
from kvfold.bench.models import BenchModel
from kvfold.generation.static import decode as static_decode
from tests.helpers.benchmarks import STAND_IN


@pytest.fixture(scope="module")
def subject() -> BenchModel:
    return BenchModel.of("tiny", "float32", 0)


@pytest.fixture
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each peak takes seconds: one test measures it, the others go without."""
    monkeypatch.setattr(sides, "can_measure", lambda: False)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of operations that run one by one, which are quick to make."""
    quick = CompileConfig(fullgraph=True, backend="eager", mode=None)
    monkeypatch.setattr(sides, "compile_config", lambda given: quick)
    monkeypatch.setattr(static_decode, "compile_config", lambda given: quick)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: BenchModel, no_peak: None
) -> Iterator[kvpress.KvpressPeer]:
    """A peer's process that answers without doing anything."""
    script = tmp_path / "peer.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(kvpress, "SCRIPT", script)
    monkeypatch.setattr(kvpress, "can_measure", lambda: False)
    last = sorted(subject.model.named_parameters())[-1][1].detach()
    monkeypatch.setenv("CHECK", json.dumps(last.flatten()[:8].double().tolist()))
    peer = kvpress.KvpressPeer(subject, Path(sys.executable))
    yield peer
    peer.close()
