# SPDX-License-Identifier: Apache-2.0
"""The same tiny random model on a CPU and on a GPU, in float32; all is skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.helpers.models import build

transformers.logging.set_verbosity_error()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture(scope="session")
def on_cpu() -> Any:
    return build("llama")


@pytest.fixture(scope="session")
def on_gpu() -> Any:
    return build("llama").to("cuda")
