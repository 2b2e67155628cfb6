# SPDX-License-Identifier: Apache-2.0
"""One thread, no chatter from transformers, and Triton's interpreter where there is no GPU."""

import contextlib
import gc
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import transformers

# Tests of mechanics run on the CPU everywhere; `make test-gpu` shows kernels' tests a GPU.
if "KVFOLD_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # of child processes: as many tests run as there are cores
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

# Of a file, `make quick` runs so many tests, each with one case.
QUICK_TESTS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases that others stand for, and what `make quick` leaves out of a file.

    Tests say by marks of their own what differs from that: CONTRIBUTING.md describes them.
    """
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    quick = Counter[Path]()
    for every in tests.values():
        cases = [item for item in every if not item.get_closest_marker("whole")] or every
        mark = cases[0].get_closest_marker("cases")
        chosen = [0]
        if len(cases) > 1:
            number = mark.args[0] if mark else None
            chosen = covering([item.callspec.params for item in cases], number)
        for index in set(range(len(cases))) - set(chosen):
            cases[index].add_marker(pytest.mark.whole)
        shown = cases[chosen[0]]
        if not {"slow", "whole"} & {mark.name for mark in shown.iter_markers()}:
            quick[shown.path] += 1
            chosen = chosen[1:] if quick[shown.path] <= QUICK_TESTS else chosen
        for index in chosen:
            cases[index].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Collected tests stay until the end: later rounds of the garbage collector pass them by."""
    gc.freeze()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels are chosen on a CPU, and interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
