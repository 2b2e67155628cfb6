# SPDX-License-Identifier: Apache-2.0
"""Methods: the registry, the texts that name them, and what does not fit together."""

import subprocess
import sys

import kvfold
from kvfold.methods.registry import listed


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
