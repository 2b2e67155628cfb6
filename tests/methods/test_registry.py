# SPDX-License-Identifier: Apache-2.0
"""Methods: the registry, the texts that name them, and what does not fit together."""

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
