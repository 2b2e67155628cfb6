# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM under which pages would be wrong are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvfold import KvfoldError
from kvfold.serve.vllm.head_pages.plugin import check_attention
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


def attending(**changes):
    """An attention layer of vLLM, as far as its kind."""
    fields = {"sinks": None, "alibi_slopes": None, "sliding_window": -1} | changes
    return SimpleNamespace(impl=SimpleNamespace(**fields))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sinks": "there"}, "has attention sinks: "),
        ({"alibi_slopes": "there"}, "has ALiBi: "),
        ({"sliding_window": 63}, "has a window: "),
        ({"sliding_window": 63, "sinks": "there"}, "has attention sinks and a window: "),
    ],
    ids=str,
)
def test_attention_that_does_not_go_with_pages_of_single_heads_is_refused(changes, said):
    check_attention({"model.layers.0": attending()})
    with pytest.raises(KvfoldError, match=f"model.layers.1 {said}use kvfold's own server"):
        check_attention({"model.layers.0": attending(), "model.layers.1": attending(**changes)})
