# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM would answer wrongly are refused."""

from __future__ import annotations

import pytest

from kvfold import KvfoldError
from kvfold.serve.vllm.request import ContextPrompt
from kvfold.serve.vllm.scheduler import context_of
from tests.helpers.vllm import WRONG, request_for


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_would_be_answered_wrongly_is_refused(served_folder, compatibility, name):
    changes, reason = WRONG[name]
    served = served_folder.get("even")
    assert context_of(request_for(served), served_folder, compatibility.check) == served
    with pytest.raises(KvfoldError, match=reason):
        context_of(request_for(served, **changes), served_folder, compatibility.check)


def test_a_request_with_nothing_after_its_placeholders_is_refused(served_folder, compatibility):
    served = served_folder.get("even")
    request = request_for(served, prompt_token_ids=served.tokens)
    with pytest.raises(KvfoldError, match="nothing follows the 40 placeholders"):
        context_of(request, served_folder, compatibility.check)
    with pytest.raises(KvfoldError, match="nothing is asked"):
        ContextPrompt(served, [])


def test_an_ordinary_request_is_none_of_kvfolds_business(served_folder, compatibility):
    for changes in ({}, {"cache_salt": "mine"}, {"kv_transfer_params": {"other": 1}}):
        assert context_of(request_for(None, **changes), served_folder, compatibility.check) is None
