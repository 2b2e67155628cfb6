# SPDX-License-Identifier: Apache-2.0
"""One thread, no chatter from transformers, and Triton's interpreter where there is no GPU."""

import contextlib
import gc
import os
from collections import defaultdict

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
from tests.helpers.cases import covering  # noqa: E402

dispatch.INTERPRETED = False

# Of a parametrised test, `make quick` runs so many cases.
QUICK_CASES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the further cases of parametrised tests; single tests say it themselves.

    `make test` runs `cases` of them, or those that stand for all; `make quick` the first of these.
    """
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if len(cases) > 1:
            mark = cases[0].get_closest_marker("cases")
            number = mark.args[0] if mark else None
            chosen = covering([item.callspec.params for item in cases], number)
            for index, item in enumerate(cases):
                if index not in chosen:
                    item.add_marker(pytest.mark.whole)
                elif index not in chosen[:QUICK_CASES]:
                    item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Collected tests stay until the end: later rounds of the garbage collector pass them by."""
    gc.freeze()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are chosen on a CPU, and interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
