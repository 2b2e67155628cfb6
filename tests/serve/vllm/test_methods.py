# SPDX-License-Identifier: Apache-2.0
"""Methods of texts for vLLM: the start says what each of their files would be told."""

from __future__ import annotations

import pytest

import kvfold
from kvfold import KvfoldError, parse
from kvfold.contexts.files.format import read_header
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.methods import LEVEL, fitting
from kvfold.serve.vllm.placeholders import ServedFolder
from tests.helpers.budgets import METHODS
from tests.helpers.contexts import DOCUMENT
from tests.helpers.vllm import BLOCK

MORE = ["kvzip", "kvzip:level=uniform", "kvzip + level", "snapkv + adakv"]
COMPOSED = ["snapkv + reindex", "snapkv + kivi:bits=4,group=8,residual=8"]


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize("paged", [Paged(BLOCK), None], ids=["pages", "levels"])
@pytest.mark.parametrize("spec", [*METHODS, *MORE, *COMPOSED])
def test_a_method_is_refused_or_its_text_is_served(spec, paged, model, tokenizer, tmp_path) -> None:
    method = parse(spec)
    budget = 60 if method.takes_budget else None
    path = tmp_path / "a.kvfold"
    try:
        fitted, rule = fitting(method, None, paged)
    except KvfoldError as refusal:
        if method.stages().encode is None:
            assert "cannot be changed so" in str(refusal)
            return
        kvfold.compress(model, tokenizer, DOCUMENT, method, budget).save(path)
        with pytest.raises(KvfoldError, match="stores entries encoded"):
            ServedFolder(tmp_path, paged).get("a")
        return
    context = kvfold.compress(model, tokenizer, DOCUMENT, fitted, budget)
    if rule is not None:
        context = context.levelled(rule)
    context.save(path)
    served = ServedFolder(tmp_path, paged).get("a")
    assert rule in (None, LEVEL) and (served.level is None) == (rule is None)
    if fitted == method and rule is None:  # nothing was to be changed
        kept = {count for layer in read_header(path).layers for count in layer.kept}
        assert len(kept) == 1 and served.pages is None
    assert rule is None or paged is None


PAGED = Paged(32)


@pytest.mark.parametrize(
    "spec, rule, paged, expected",
    [
        ("snapkv", None, PAGED, ("snapkv", None)),
        ("snapkv", "votes", PAGED, ("snapkv", "votes")),
        ("kvzip", None, PAGED, ("kvzip + pages", None)),
        ("kvzip", None, Paged(64), ("kvzip + pages:size=64", None)),
        ("kvzip", None, None, ("kvzip", "mass")),
        ("kvzip", "union", PAGED, ("kvzip", "union")),
        ("kvzip", "union", None, ("kvzip", "union")),
        ("pyramidkv + adakv", None, PAGED, ("pyramidkv + adakv + pages", None)),
        ("adakv", None, None, ("adakv", "mass")),
        ("kvzip + pages", None, PAGED, ("kvzip + pages", None)),
        ("kvzip + pages:size=64", None, PAGED, ("kvzip + pages:size=64", None)),
        ("kvzip + level", None, PAGED, ("kvzip + level", None)),
        ("kvzip + level", None, None, ("kvzip + level", None)),
        ("full", None, PAGED, ("full", None)),
    ],
)
def test_heads_that_keep_different_numbers_get_pages_or_levels(spec, rule, paged, expected) -> None:
    fitted, asked = fitting(parse(spec), rule, paged)
    assert (str(fitted), asked) == (str(parse(expected[0])), expected[1])


@pytest.mark.parametrize(
    "spec, rule, paged, said",
    [
        ("kivi:bits=4", None, PAGED, "stores entries encoded"),
        ("kvzip + kivi:bits=4", None, PAGED, "stores entries encoded"),
        ("kvzip + match", None, PAGED, "choose match:bias=none"),
        ("d2o", None, PAGED, "which do not fill pages; cannot be changed so: pages are made of"),
        ("d2o", None, None, "which do not fill pages; cannot be changed so: level makes one"),
        ("pyramidinfer", None, PAGED, "cannot be changed so: pages evicts nothing itself"),
        ("h2o", "mass", PAGED, "h2o cannot be changed so: level makes one set"),
        ("kvzip + level", "votes", None, "cannot be changed so: level and level:rule=votes both"),
        ("kvzip + pages", "votes", PAGED, "cannot be changed so: pages and level:rule=votes both"),
        ("kvzip + pages:size=16", None, PAGED, "vLLM's are of 32: take pages:size=32"),
        ("kvzip + pages:size=48", None, PAGED, "fills pages of 48 entries"),
        ("kvzip + pages", None, None, "which this vLLM does not have: take --level"),
    ],
)
def test_what_pages_cannot_hold_is_refused_before_a_text_comes(spec, rule, paged, said) -> None:
    with pytest.raises(KvfoldError) as refusal:
        fitting(parse(spec), rule, paged)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
