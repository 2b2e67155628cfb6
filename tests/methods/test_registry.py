# SPDX-License-Identifier: Apache-2.0
"""Methods: the registry, the texts that name them, and what does not fit together."""

import subprocess
import sys

import kvfold


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
    listed = kvfold.list_methods()
    assert known.items() <= listed.items()
    assert list(listed) == sorted(listed)


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
