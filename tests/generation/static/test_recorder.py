# SPDX-License-Identifier: Apache-2.0
"""Recorders; that of CUDA runs in tests_gpu."""

from __future__ import annotations

import torch

from kvfold.generation.static.recorder import CudaGraphs, Uncaptured, recorder_for


def test_a_gpu_gets_graphs_and_a_cpu_runs_each_step():
    assert isinstance(recorder_for(torch.device("cuda", 1)), CudaGraphs)
    assert isinstance(recorder_for(torch.device("cpu")), Uncaptured)


def test_to_record_runs_nothing():
    runs: list[int] = []
    recorder = Uncaptured()
    replay = recorder.record(lambda: runs.append(1))
    assert not runs
    replay()
    recorder.warm_up(lambda: runs.append(2))
    assert runs == [1, 2]
