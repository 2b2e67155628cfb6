# SPDX-License-Identifier: Apache-2.0
"""Every registered method once, with its defaults, on a really trained model and a real text.

Fitted methods take the files beside the model: those of `make real`, or of `make fits`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvfold
from tests.helpers.budgets import composed, holds

pytestmark = pytest.mark.real

TOKENS, BUDGET, NEW = 512, 0.3, 6
# Methods that add to others: the options that they need, or that let a round come by.
OPTIONS = {"every": ":interval=4", "merge": ":rule=d2o", "fair": ":spans=0/40/40/200"}
FITTED = {
    "zap": "scorer",
    "zap_threshold": "scorer",
    "qfilter": "filters",
    "duo": "heads",
    "curve": "curve",
}
# Released integers that overspend; rounds, which fall below the budget and rise again; a prompt
# that is kept whole.
OWN_COUNT = ("pyramidkv_official", "d2o_official", "every", "triattention")


@pytest.fixture
def spec(request: pytest.FixtureRequest, full_layers, slides, folder, tmp_path) -> str:
    """A method's text, with another one before it and with its file where it needs them."""
    name: str = request.param
    if slides and name == "pyramidinfer":
        pytest.skip("it prunes tokens between layers, which a model that slides has to refuse")
    if name == "sizes":
        layers = len(full_layers)
        file = tmp_path / "sizes.json"
        file.write_text(json.dumps([0.1 + 0.4 * layer / layers for layer in range(layers)]))
    elif fitted := FITTED.get(kvfold.list_methods()[name].name):  # a preset's method
        file = Path(f"{folder}-{fitted}.safetensors")
        if not file.is_file():
            pytest.skip(f"{file} is not there: `make fits` makes it for a model of `make real`")
    else:
        return composed(name) + OPTIONS.get(name, "")
    return f"{name}:file={file}"


@pytest.mark.parametrize("spec", kvfold.list_methods(), indirect=True)
def test_a_method_answers_and_spends_its_budget(model, tokenizer, ids, spec):
    budget = BUDGET if kvfold.parse(spec).takes_budget else None
    cache = kvfold.CompressedCache(model, spec, budget, tokenizer=tokenizer)
    prompt = ids[:, :TOKENS]
    made = kvfold.generate(
        model,
        prompt,
        cache=cache,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert made.sequences.shape[1] == TOKENS + NEW
    assert all(logits.isfinite().all() for logits in made.logits)
    counts = torch.tensor(cache.stats().kept)
    seen = TOKENS + NEW - 1  # the last token generated was not read
    assert counts.max() <= seen and cache.get_seq_length() == seen
    if budget is not None and not any(name in spec for name in OWN_COUNT):
        # KVzip compresses before the prompt's last token, which is read with the answer.
        read = TOKENS - 1 if spec.startswith("kvzip") else TOKENS
        added = 0 if holds(spec) else seen - read
        # Sizes from a file share what a head's share of the budget is before it is rounded.
        shared = BUDGET * read if spec.startswith(("sizes", "curve")) else int(BUDGET * read)
        of_layer = counts[0].numel() * shared
        page = kvfold.parse(spec).stages().shape  # or the name of a rule, after which counts stay
        if isinstance(page, int):
            of_layer = of_layer // page * page
        assert counts.sum() == int(round(len(counts) * of_layer, 6)) + counts.numel() * added
