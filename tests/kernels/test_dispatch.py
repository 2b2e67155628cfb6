# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, on a CPU and on a GPU."""

import pytest
import torch

from kvfold.kernels import dispatch

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")


def test_paths_on_a_cpu(monkeypatch):
    query, rows = torch.zeros(1, 8, 1, 64), torch.zeros(2, 64)

    def paths():
        return [
            dispatch.rows_path(query, rows, softcap=None),
            dispatch.packed_path(query, value_size=64),
            dispatch.pack_path(rows, 32),
            dispatch.gather_path(query),
        ]

    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert paths() == ["torch"] * 4
    monkeypatch.setattr(dispatch, "library", object)
    assert paths() == ["torch", "native", "torch", "torch"]
    for other in (query.double(), query.expand(1, 8, 2, 64)):
        assert dispatch.packed_path(other, value_size=64) == "torch"
    monkeypatch.setattr(dispatch, "library", lambda: None)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    assert paths() == ["triton"] * 4
    assert dispatch.rows_path(query.double(), rows, softcap=None) == "torch"
    assert dispatch.rows_path(query.expand(1, 8, 2, 64), rows, softcap=None) == "torch"
    wide = torch.zeros(1, 8, 1, 256)
    assert dispatch.rows_path(wide, rows, softcap=None) == "torch"
    assert dispatch.rows_path(wide.half(), rows, softcap=None) == "triton"
    assert dispatch.pack_path(rows, 48) == "torch"
    options = {"softcap": None, "sink_logits": None, "masked": False, "squares": False}
    assert dispatch.columns_path(query, query, **options) == "torch"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert paths() == ["torch"] * 4


def test_paths_on_a_gpu(monkeypatch):
    """Only what is asked of tensors matters, so others will do."""

    class OnGpu:
        is_cuda, device = True, torch.device("cuda")

        def __init__(self, *shape, dtype=torch.bfloat16):
            self.shape, self.dtype = shape, dtype

    query, rows = OnGpu(1, 8, 1, 64), OnGpu(9, 64)
    plain = {"softcap": None}
    columns = {**plain, "sink_logits": None, "masked": False}
    assert dispatch.rows_path(query, rows, **plain) == "triton"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "triton"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert dispatch.rows_path(query, rows, **plain) == "varlen"
    assert dispatch.rows_path(query, OnGpu(9, 32), **plain) == "torch"
    assert dispatch.rows_path(query, rows, softcap=30.0) == "torch"
    single = OnGpu(1, 8, 1, 64, dtype=torch.float32)
    assert dispatch.rows_path(single, rows, **plain) == "torch"
    assert dispatch.columns_path(query, rows, **columns, squares=False) == "flash"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "torch"
    large = OnGpu(1, 8, 1, 256)
    assert dispatch.columns_path(large, OnGpu(9, 256), **columns, squares=False) == "torch"
