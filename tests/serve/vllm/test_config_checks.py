# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM under which pages would be wrong are refused."""

from __future__ import annotations

import pytest

from kvfold import KvfoldError
from kvfold.serve.vllm.scheduler import check_engine
from tests.helpers.vllm import engine


def test_settings_under_which_pages_would_be_wrong_are_refused():
    check_engine(engine(), 1)
    for changes in (
        {"kv_load_failure_policy": "recompute"},
        {"speculative_config": object()},
        {"quantization": "fp8"},
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ):
        with pytest.raises(KvfoldError, match=next(iter(changes))):
            check_engine(engine(**changes), 1)
    with pytest.raises(KvfoldError, match="several kinds"):
        check_engine(engine(), 2)
