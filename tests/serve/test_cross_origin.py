# SPDX-License-Identifier: Apache-2.0
"""Web pages of allowed sites: preflight requests pass without a key, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvfold import KvfoldError
from kvfold.serve.settings import ServerSettings
from tests.helpers.contexts import new_model
from tests.helpers.serving import CHAT, Running, assert_clean, chat, running
from tests.helpers.tokenizers import word_tokenizer

PAGE, OTHER = "https://page.example", "https://other.example"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running(new_model(), word_tokenizer(), api_key="right", origins=(PAGE,)) as made:
        yield made


def preflight(server: Running, origin: str, headers: str = "authorization, x-a") -> Any:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": headers}
    return server.http.options(CHAT, headers={"Origin": origin, **asked})


def test_a_preflight_request_passes_without_a_key(keyed):
    answered = preflight(keyed, PAGE)
    assert answered.status_code == 204 and not answered.content
    assert answered.headers["access-control-allow-origin"] == PAGE
    assert answered.headers["access-control-allow-headers"] == "authorization, x-a"
    assert "POST" in answered.headers["access-control-allow-methods"]
    assert "origin" in answered.headers["vary"].lower()
    assert_clean(preflight(keyed, PAGE, "a: b"), 400)


def test_the_key_is_asked_for_and_other_sites_get_no_leave(keyed):
    refused = keyed.http.post(CHAT, json=chat(), headers={"Origin": PAGE})
    assert_clean(refused, 401, "API key")
    assert refused.headers["access-control-allow-origin"] == PAGE
    right = {"Authorization": "Bearer right"}
    answered = keyed.http.post(CHAT, json=chat(), headers={"Origin": PAGE, **right})
    assert answered.status_code == 200
    assert answered.headers["access-control-allow-origin"] == PAGE
    other = preflight(keyed, OTHER)
    assert_clean(other, 401)
    assert "access-control-allow-origin" not in other.headers
    # No preflight request: the key is asked for as ever.
    assert_clean(keyed.http.options(CHAT, headers={"Origin": PAGE}), 401)


@pytest.mark.slow
@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_without_a_key_pages_of_allowed_sites_only_are_answered(origins):
    with running(new_model(), word_tokenizer(), origins=origins) as server:
        assert server.http.post(CHAT, json=chat(), headers={"Origin": PAGE}).status_code == 200
        other = server.http.post(CHAT, json=chat(), headers={"Origin": OTHER})
        assert other.status_code == (200 if "*" in origins else 403)
        # A name that its owner made to point here.
        rebound = {"Host": "page.example", "Origin": PAGE}
        assert_clean(
            server.http.post(CHAT, json=chat(), headers=rebound),
            403,
            "the header Host names another",
        )


@pytest.mark.parametrize(
    "origin", ["page.example", "https://Page.example", "https://a/", "", "null"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(KvfoldError, match="is no origin"):
        ServerSettings(origins=(origin,))
