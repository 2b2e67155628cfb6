# SPDX-License-Identifier: Apache-2.0
"""Codecs by name, and what is wrong with others."""

from __future__ import annotations

import pytest

from kvfold.codecs.codec import Kvtc, codec_of, spelled
from kvfold.errors import KvfoldError


def test_codecs_are_spelled_out_so_that_they_can_be_read():
    for plain in ("zstd", "kivi4"):
        assert codec_of(plain) == plain and spelled(plain) == plain
    made = codec_of("kvtc:file=a.safetensors, ratio=8")
    assert made == Kvtc(file="a.safetensors", ratio=8, sinks=4, window=16)
    assert codec_of(spelled(made)) == made


@pytest.mark.parametrize(
    "text, told",
    [
        ("gzip", 'there is no codec \'gzip\': write "zstd", "kivi4" or'),
        ("zstd:level=3", "there is no codec"),
        ("kvtc", "file: field required"),
        ("kvtc:ratio=8", "file: field required"),
        ("kvtc:file=a,ratio=0.5", "ratio: input should be greater than or equal to 1"),
        ("kvtc:file=a,ratio=nan", "ratio: "),
        ("kvtc:file=a,sinks=x", "sinks: input should be a valid integer"),
        ("kvtc:file=a,bits=4", "bits: extra inputs are not permitted"),
        ("kvtc:file=a,", None),
    ],
)
def test_others_are_refused(text, told):
    if told is None:
        assert codec_of(text) == Kvtc(file="a")
        return
    with pytest.raises(KvfoldError, match=told):
        codec_of(text)
