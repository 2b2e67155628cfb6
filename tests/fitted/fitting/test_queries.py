# SPDX-License-Identifier: Apache-2.0
"""What every fit refuses before it reads a text."""

from __future__ import annotations

from functools import partial

import pytest

import kvfold
from kvfold import KvfoldError
from kvfold.fitted.fitting.kinds import OTHERS, other_fit
from kvfold.fitted.fitting.queries import check_inputs
from kvfold.fitted.fitting.scorer import fit_scorer
from tests.fitted.fitting.test_scorer import texts

FITS = OTHERS | {"zap": fit_scorer, "curve": other_fit("snapkv:window=8 + curve")}


@pytest.fixture(params=sorted(FITS))
def fit(request, monkeypatch):
    """A fit by the bundled model, in which no text can be read."""

    def never(*_, **__):
        raise AssertionError("a text was read")

    model, tokenizer = kvfold.bundled_model()
    monkeypatch.setattr(model, "forward", never)
    return partial(FITS[request.param], model, tokenizer)


def test_a_place_that_no_file_can_be_written_to_is_refused(fit, tmp_path):
    with pytest.raises(KvfoldError, match="is a folder"):
        fit(texts(), tmp_path)
    with pytest.raises(KvfoldError, match="there is no folder"):
        fit(texts(), tmp_path / "nowhere" / "a")


def test_texts_beyond_the_model_s_length_are_refused(fit, tmp_path):
    fit.args[0].config.max_position_embeddings = 100
    fitting = " ".join(["the"] * 97)  # behind the chat template's three tokens
    told = r"text 1 is too long to fit a scorer, 101 tokens, and \w+ reads at most 100.*--words"
    with pytest.raises(KvfoldError, match=told):
        fit([fitting, fitting + " the", fitting, fitting], tmp_path / "a")
    check_inputs(*fit.args, [fitting] * 4, 4, tmp_path / "a")
