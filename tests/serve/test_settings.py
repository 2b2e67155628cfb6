# SPDX-License-Identifier: Apache-2.0
"""Settings that no request could be answered with are refused at the start."""

from __future__ import annotations

import math

import pytest

from kvfold.errors import KvfoldError
from kvfold.serve.settings import ServerSettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"session_method": "nosuch"}, "session_method 'nosuch' .* unknown method"),
        ({"session_method": "kvzip"}, "forwards of its own.*: choose SnapKV"),
        ({"session_method": "full"}, "takes no budget, which bounds a session: choose another"),
        ({"session_budget": 31}, "session_budget 31: .* keeps 32 .* raise it to at least 32"),
        ({"session_method": "streaming_llm:sinks=9", "session_budget": 8}, "at least 9"),
        ({"method": "snapkv", "chat_budget": 31}, "at least 32 .* chat_budget is 31: raise it"),
        ({"chat_budget": 0}, "at least 1 .* chat_budget is 0: raise it"),
        ({"api_key": "secret\n"}, "begins or ends with white space"),
        ({"client_timeout": math.inf}, "finite number of seconds, not inf: choose"),
        ({"client_timeout": math.nan}, "finite number of seconds, not nan: choose"),
        ({"shadow": 1.5}, "part of the requests, not 1.5: try 0.01"),
        ({"shadow": math.nan}, "part of the requests, not nan"),
        ({"shadow_tolerance": 0.0}, "between 0 and 1 nats per token"),
        ({"client_timeout": 0.0}, "positive, finite number"),
    ],
    ids=str,
)
def test_what_would_fail_at_each_request_is_refused(settings, said):
    with pytest.raises(KvfoldError, match=said):
        ServerSettings(**settings)


def test_the_least_that_methods_keep_is_taken():
    made = ServerSettings(method="snapkv", session_budget=32, chat_budget=32, client_timeout=1e9)
    assert made.session_budget == made.chat_budget == 32
    # KVzip's scores are not for later turns, of which the newest entry is enough.
    assert ServerSettings(chat_budget=1).chat_budget == 1
