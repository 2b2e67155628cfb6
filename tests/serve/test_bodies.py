# SPDX-License-Identifier: Apache-2.0
"""Bodies: too large, broken off, or of another length than they say."""

from __future__ import annotations

import pytest

from tests.helpers.serving import BODY_LIMIT, CHAT, assert_clean, head, raw

pytestmark = pytest.mark.usefixtures("goes_on")


def test_an_oversized_body_is_refused_whatever_its_length_says(server):
    large = b'{"text": "' + b"a" * BODY_LIMIT + b'"}'
    for path in ("/v1/contexts", CHAT):
        assert_clean(
            server.http.post(path, content=large, headers={"content-type": "application/json"}),
            413,
            f"larger than the {BODY_LIMIT} bytes",
        )
        pieces = [large[i : i + 1000] for i in range(0, len(large), 1000)]
        chunked = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
        chunks = [head(path, "Transfer-Encoding: chunked"), *chunked, b"0\r\n\r\n"]
        assert raw(server, *chunks).startswith(b"HTTP/1.1 413")
    upload = {"file": ("a.txt", large)}
    assert_clean(server.http.post("/v1/contexts", files=upload), 413)
    assert raw(server, head(CHAT, f"Content-Length: {10**15}")).startswith(b"HTTP/1.1 413")


def test_a_length_that_is_not_true_harms_nobody(server):
    for length, body in ((5, b'{"model": "tiny"}'), (10, b"{"), (-5, b"{}"), ("a", b"{}")):
        answer = raw(server, head(CHAT, f"Content-Length: {length}"), body)
        assert b" 200 " not in answer and b" 500 " not in answer and b"Traceback" not in answer
