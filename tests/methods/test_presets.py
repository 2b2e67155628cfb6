# SPDX-License-Identifier: Apache-2.0
"""Presets and options of all methods: the published values, and values that mean nothing."""

import re

import pytest

from kvfold import CompressedCache, KvfoldError, parse
from tests.helpers.models import prompts
from tests.helpers.truth import Reader


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adakv:floor=1.5", "0 to 1"),
        ("adakv:floor=nan", "0 to 1"),
        ("adakv:kernel=2", "odd and positive"),
        ("expected_attention:future=0", "future is from 1 to 131072, not 0"),
        ("expected_attention:sinks=-1", "sinks is 0 or more, not -1"),
        ("expected_attention:epsilon=nan", "epsilon is 0 or more, not nan"),
        ("kvzip:chunk=0", "chunk is 1 or more, not 0"),
        ("kvzip:strict=true,level=head", "choose level=pair"),
        ("kvzip:demote=1.5", "demote is from 0 to 1"),
        ("kvzip:demote=0.5,demote_repeats=0", "demote_repeats is 1 or more, not 0"),
        ("kvzip:level=head,head_scores=a.pt,demote=0.5", "taken as they are"),
        ("kvzip_plus:level=head,head_scores=a.pt", "taken as they are"),
        ("kvzip:level=head,head_scores=a.pt,score=rms", "taken as they are"),
        ("kvzip:floor=1.5", "from 0 to 1"),
        ("kvzip:strict=true,floor=0.2", "floor goes with a plain pool"),
        ("kvzip:level=uniform,floor=0.2", "floor goes with a plain pool"),
        ("simlayerkv:window=0", "1 or more"),
        ("simlayerkv:n_last=0", "1 or more"),
        ("simlayerkv:sinks=-1", "0 or more"),
        ("simlayerkv:strategy=random,when=first_decode", "choose when=last_query"),
        ("simlayerkv_qwen:strategy=pyramid", "keep_last_layer=false"),
        ("dbudgetkv:threshold=-0.1", "0 or more"),
        ("dbudgetkv:threshold=nan", "0 or more"),
        ("dbudgetkv:rows=0", "rows is 1 or more, not 0"),
        ("dbudgetkv:sinks=-1", "sinks is 0 or more"),
        ("roco:protect_recent=-1", "0 or more"),
        ("roco:protect_std_ratio=1.1", "0 to 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec)


def test_presets_hold_the_published_values():
    thresholds = {
        name: parse(f"simlayerkv_{name}").threshold
        for name in ("llama2", "llama3", "mistral", "qwen")
    }
    assert thresholds == {"llama2": 0.65, "llama3": 0.9, "mistral": 0.8, "qwen": 0.85}
    assert parse("simlayerkv_qwen").keep_last_layer and not parse("simlayerkv").keep_last_layer
    assert parse("dbudgetkv_literal").include_sinks and not parse("dbudgetkv").include_sinks
    assert parse("dbudgetkv").keep_layers == (0, 1)


@pytest.mark.parametrize(
    ("spec", "budget", "why"),
    [
        ("pyramidkv_official:window=8", 20, "rounds its step down"),
        ("adakv:window=8,rule=blend", 20, "rounded by itself"),
        ("d2o:allocation=exponential", 20, "do not add up"),
        ("pyramidkv_official:window=8 + adakv:rule=blend", 20, "step down.*; .*by itself"),
    ],
)
def test_methods_that_do_not_spend_their_budget_say_why(model, spec, budget, why):
    cache = CompressedCache(model, spec, budget)
    Reader(model, cache)(prompts((64,))[0])
    assert re.search(why, str(cache.stats()))
