# SPDX-License-Identifier: Apache-2.0
"""Methods: the registry, the texts that name them, and what does not fit together."""

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import kvfold
from kvfold import KvfoldError
from kvfold.methods.base import parse, parts_of
from kvfold.methods.registry import listed
from tests.helpers.budgets import composed

DOCS = Path(__file__).parents[2] / "docs"


def test_methods_are_listed_by_name():
    known = {
        "full": kvfold.Full,
        "h2o": kvfold.H2O,
        "knorm": kvfold.KNorm,
        "local_window": kvfold.LocalWindow,
        "pyramidkv": kvfold.PyramidKV,
        "pyramidkv_official": kvfold.PyramidKV,
        "random": kvfold.Random,
        "snapkv": kvfold.SnapKV,
        "snapkv_kvpress": kvfold.SnapKV,
        "snapkv_official": kvfold.SnapKV,
        "streaming_llm": kvfold.StreamingLLM,
        "streaming_llm_original": kvfold.StreamingLLM,
        "tova": kvfold.TOVA,
    }
    found = kvfold.list_methods()
    assert known.items() <= found.items()
    assert list(found) == sorted(found)


def test_names_in_a_list_are_those_registered():
    text = "SnapKV:window=16,kernel=5, snap-kv + KIVI,KnormPress:skip_layers=0,1, H2O,unknown"
    assert listed(text) == [
        "snapkv:window=16,kernel=5",
        "snapkv + kivi",
        "knorm:skip_layers=0,1",
        "h2o",
        "unknown",
    ]


def test_names_of_several_words_stay_in_their_part_of_a_list():
    assert listed("knorm,Expected Attention, Snap KV Press:window=4,kernel=3 + KIVI,H2O") == [
        "knorm",
        "expected_attention",
        "snapkv:window=4,kernel=3 + kivi",
        "h2o",
    ]


def test_names_of_kvpress_lead_to_those_of_kvfold():
    table = tomllib.loads((DOCS / "kvpress.toml").read_text("utf-8"))
    for row in table["press"]:
        name = re.match(r"\w+", row["name"])[0]
        if row["spec"] and name != "ComposedPress":  # which is a plus sign
            try:
                found = str(parse(name))
            except KvfoldError as refused:
                found = str(refused)
            wanted = {part.name for part in parts_of(parse(row["spec"]))}
            assert any(each in found for each in wanted), (name, found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ObservedAttentionPress", "did you mean 'h2o:recent=0,normalize=visible_queries'?"),
        ("SnapKVPress(window_size=64)", "did you mean 'snapkv'?"),
        ("QuantizedCache", "did you mean 'kivi'?"),
        ("none", "did you mean 'full'?"),
        ("snapkv:compression_ratio=0.5", "the budget stands beside it"),
        ("KVzip+", "write 'kvzip_plus'"),
        ("KVzip+ + level", "write 'kvzip_plus'"),
        ("snapkv+", "an empty method name"),
    ],
)
def test_what_is_meant_is_told(name, said):
    with pytest.raises(KvfoldError) as refused:
        parse(name)
    assert said in str(refused.value)


def test_the_list_is_a_copy():
    kvfold.list_methods().clear()
    assert "snapkv" in kvfold.list_methods()


def test_threads_that_ask_first_find_every_method():
    program = (
        "from threading import Thread\n"
        "from kvfold.methods.base import parse\n"
        "found = []\n"
        "threads = [Thread(target=lambda: found.append(str(parse('zap')))) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "assert found == ['zap'] * 4, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_no_method_of_kvfold_gives_an_option_that_is_deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for spec in map(composed, kvfold.list_methods()):
            parse(spec).stages()
