# SPDX-License-Identifier: Apache-2.0
"""Fixtures of kernels for GPUs: interpreted where there is no GPU, outputs poisoned."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def interpreter(request):
    if DEVICE == "cpu":
        request.getfixturevalue("interpreted")


@pytest.fixture
def poison(monkeypatch):
    """What a kernel leaves unwritten shows."""

    def poisoned(allocate):
        def allocated(*args, **kwargs):
            out = allocate(*args, **kwargs)
            whole = 201 if out.dtype == torch.uint8 else -1234567
            return out.fill_(torch.nan if out.is_floating_point() else whole)

        return allocated

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
