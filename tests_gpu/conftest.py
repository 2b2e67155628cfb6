# SPDX-License-Identifier: Apache-2.0
"""The same tiny random model on a CPU and on a GPU, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.helpers.models import build

transformers.logging.set_verbosity_error()


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests_gpu needs an NVIDIA GPU, and a torch that sees it", returncode=1)


@pytest.fixture(scope="session")
def on_cpu() -> Any:
    return build("llama")


@pytest.fixture(scope="session")
def on_gpu() -> Any:
    return build("llama").to("cuda")
