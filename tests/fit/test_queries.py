# SPDX-License-Identifier: Apache-2.0
"""What every fit refuses before it reads a text."""

from __future__ import annotations

from functools import partial

import pytest

import kvfold
from kvfold import KvfoldError
from kvfold.fit.fit import fit_scorer
from kvfold.fit.kinds import OTHERS, other_fit
from tests.fit.test_fit import texts

FITS = OTHERS | {"zap": fit_scorer, "curve": other_fit("snapkv:window=8 + curve")}


@pytest.fixture(params=sorted(FITS))
def fit(request, monkeypatch):
    """A fit by the bundled model, in which no text can be read."""

    def never(*_):
        raise AssertionError("a text was read")

    model, tokenizer = kvfold.bundled_model()
    monkeypatch.setattr(model, "forward", never)
    return partial(FITS[request.param], model, tokenizer)


def test_a_place_that_no_file_can_be_written_to_is_refused(fit, tmp_path):
    with pytest.raises(KvfoldError, match="is a folder"):
        fit(texts(), tmp_path)
    with pytest.raises(KvfoldError, match="there is no folder"):
        fit(texts(), tmp_path / "nowhere" / "a")
