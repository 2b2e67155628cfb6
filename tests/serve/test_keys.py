# SPDX-License-Identifier: Apache-2.0
"""The key that a server asks for."""

from __future__ import annotations

import pytest

from tests.helpers.packages import Package
from tests.helpers.serving import CHAT, assert_clean, running
from tests.helpers.tokenizers import word_tokenizer

pytestmark = pytest.mark.usefixtures("goes_on")


@pytest.mark.slow
def test_a_key_is_asked_for(model):
    with running(model, word_tokenizer(), api_key="right") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic right"},
            {"Authorization": "Bearer ri"},
            {"Authorization": b"Bearer \xff"},
        ):
            for path in ("/v1/models", "/v1/none"):
                answered = server.http.get(path, headers=headers)
                assert_clean(answered, 401, "API key")
                assert answered.headers["www-authenticate"] == "Bearer"
            assert_clean(server.http.post(CHAT, content=b"{", headers=headers), 401)
        assert server.http.get("/health").status_code == 200
        with pytest.raises(Package("openai").AuthenticationError):
            server.openai.models.list()
        assert server.openai.with_options(api_key="right").models.list().data
