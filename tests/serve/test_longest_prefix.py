# SPDX-License-Identifier: Apache-2.0
"""The longest held prefix of a text, in whole tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.serve.context_pool import TEXT, TOKENS, token_bytes
from kvfold.serve.stored import PrefixIndex, PrefixKey

BYTES = st.binary(max_size=4).map(lambda data: bytes(b % 2 for b in data))


@given(st.lists(st.tuples(BYTES, st.booleans()), max_size=12), BYTES)
@settings(max_examples=200, deadline=None)
def test_the_longest_is_found(keys, tail):
    prefixes, held = PrefixIndex(), []
    for i, (key, stays) in enumerate(keys):
        prefixes.add(PrefixKey.of(key), str(i))
        held.append((key, str(i)))
        if not stays:
            gone = held.pop(len(held) // 2)
            prefixes.remove(PrefixKey.of(gone[0]), gone[1])
    for data in (tail, tail + b"\0", b"\1" + tail):
        fits = [(len(k), int(n)) for k, n in held if data.startswith(k) and len(k) < len(data)]
        assert prefixes.longest(data) == (str(max(fits)[1]) if fits else None)


@pytest.mark.slow
def test_a_prefix_is_of_whole_tokens(holder, made):
    contexts = holder(3)
    contexts.add(made[0], "c0", {TEXT: PrefixKey.of(b"some text\n\n")})
    ids = made[0].ids[0].tolist()
    assert contexts.longest(TOKENS, token_bytes(ids)) is None
    assert contexts.longest(TOKENS, token_bytes([*ids, 0])).id == "c0"
    assert contexts.longest(TOKENS, token_bytes([*ids[:-1], ids[-1] + 1, 0])) is None
    assert contexts.longest(TEXT, b"some text\n\nq").id == "c0"
    assert contexts.longest(TEXT, b"some text\nq") is None
    contexts.delete("c0")
    assert contexts.longest(TOKENS, token_bytes([*ids, 0])) is None
