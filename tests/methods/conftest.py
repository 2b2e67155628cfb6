# SPDX-License-Identifier: Apache-2.0
"""A tiny random model in double precision, so that ties and orders are those of exact numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.models import build


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama", torch.float64)
