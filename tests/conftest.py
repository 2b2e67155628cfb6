# SPDX-License-Identifier: Apache-2.0
"""One thread, no chatter from transformers, and Triton's interpreter where there is no GPU."""

import contextlib
import os
from collections import Counter

import pytest
import torch
import transformers

# Tests of mechanics run on the CPU everywhere; `make test-gpu` shows kernels' tests a GPU.
if "KVFOLD_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

if not torch.cuda.is_available():
    # Kernels are interpreted, or not, as this says while triton and they are imported.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        import kvfold.kernels.triton  # noqa: F401
    del os.environ["TRITON_INTERPRET"]

from kvfold.kernels import dispatch  # noqa: E402

dispatch.INTERPRETED = False

# Of a parametrised test, `make quick` runs so many cases.
QUICK_CASES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the further cases of parametrised tests as slow; single tests say it themselves."""
    cases = Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test] += 1
        if cases[test] > QUICK_CASES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are chosen on a CPU, and interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
