# SPDX-License-Identifier: Apache-2.0
"""Methods of texts for vLLM: the start says what each of their files would be told."""

from __future__ import annotations

import pytest

import kvfold
from kvfold import KvfoldError, parse
from kvfold.contexts.files.format import read_header
from kvfold.serve.vllm.methods import LEVEL, level_for
from kvfold.serve.vllm.placeholders import ServedFolder
from tests.helpers.budgets import METHODS
from tests.helpers.contexts import DOCUMENT

MORE = ["kvzip", "kvzip:level=uniform", "kvzip + level", "snapkv + adakv"]
COMPOSED = ["snapkv + reindex", "snapkv + kivi:bits=4,group=8,residual=8"]


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize("spec", [*METHODS, *MORE, *COMPOSED])
def test_a_method_is_refused_or_its_text_is_served(spec, model, tokenizer, tmp_path) -> None:
    method = parse(spec)
    budget = 40 if method.takes_budget else None
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, budget)
    path = tmp_path / "a.kvfold"
    context.save(path)
    counts = {count for layer in read_header(path).layers for count in layer.kept}
    try:
        rule = level_for(method)
    except KvfoldError as refusal:
        if method.stages().encode is None:
            assert "cannot be levelled" in str(refusal)
            return
        with pytest.raises(KvfoldError, match="stores entries encoded"):
            ServedFolder(tmp_path).get("a")
        return
    assert rule in (None, LEVEL) and (rule is not None or len(counts) == 1)
    if rule is not None:
        context.levelled(rule).save(path)
    served = ServedFolder(tmp_path).get("a")
    assert served.lost == 0 and (served.level is None) == (rule is None)


@pytest.mark.parametrize(
    "spec, rule, parts, expected",
    [
        ("snapkv", None, False, None),
        ("snapkv", "votes", False, "votes"),
        ("kvzip", None, False, "mass"),
        ("kvzip", "union", False, "union"),
        ("pyramidkv", None, False, "mass"),
        ("pyramidkv", None, True, None),
        ("adakv", None, True, "mass"),
        ("kvzip + level", None, False, None),
        ("full", None, False, None),
    ],
)
def test_heads_are_levelled_where_they_keep_different_numbers(spec, rule, parts, expected) -> None:
    assert level_for(parse(spec), rule, parts=parts) == expected


@pytest.mark.parametrize(
    "spec, rule, said",
    [
        ("kivi:bits=4", None, "stores entries encoded"),
        ("kvzip + kivi:bits=4", None, "stores entries encoded"),
        ("kvzip + match", None, "choose match:bias=none"),
        ("d2o", None, "different numbers of entries, which vLLM's pages cannot hold; cannot be"),
        ("pyramidinfer", None, "cannot be levelled"),
        ("h2o", "mass", "h2o cannot be levelled"),
        ("kvzip + level", "votes", "cannot be levelled"),
    ],
)
def test_what_pages_cannot_hold_is_refused_before_a_text_comes(spec, rule, said) -> None:
    with pytest.raises(KvfoldError, match=said):
        level_for(parse(spec), rule)
