# SPDX-License-Identifier: Apache-2.0
"""A model's first cache is tried out, once for all threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvfold import CompressedCache, UnsupportedModel
from kvfold.cache import model_trial
from kvfold.hf.attention import is_enabled
from tests.helpers.models import build


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.slow
def test_a_first_cache_that_another_thread_tries_out_is_waited_for(model, monkeypatch):
    """Whether the model can be used is known to neither before that."""
    tried, together = [], threading.Barrier(2)

    def cannot(*_: object) -> None:
        tried.append(threading.get_ident())
        time.sleep(0.1)
        raise UnsupportedModel("this model cannot")

    def make() -> None:
        together.wait()
        with pytest.raises(UnsupportedModel, match="cannot"):
            CompressedCache(model, "knorm", 20)

    monkeypatch.setattr(model_trial, "_read", cannot)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(make) for _ in range(2)]
    assert made[0].exception() is None and made[1].exception() is None
    assert len(set(tried)) == 2
    assert not is_enabled(model) and not model._forward_hooks
