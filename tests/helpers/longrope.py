# SPDX-License-Identifier: Apache-2.0
"""A model whose frequencies change with the length of the text, and what older versions refuse."""

from __future__ import annotations

import pytest

from kvfold.hf.versions import ASSISTED_FROM, INSTALLED, TELLS_CACHE_FROM
from tests.helpers.models import (
    build,
)


def longrope():
    """A Phi-3 that changes its frequencies at 32 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5] * 4,
        "original_max_position_embeddings": 32,
    }
    changes = {"partial_rotary_factor": ..., "original_max_position_embeddings": 32}
    return build("phi3", rope_parameters=rope, **changes)


notices_drops = pytest.mark.skipif(
    INSTALLED < TELLS_CACHE_FROM, reason="refused by this transformers"
)
assists = pytest.mark.skipif(INSTALLED < ASSISTED_FROM, reason="refused by this transformers")
