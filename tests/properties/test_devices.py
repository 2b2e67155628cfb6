# SPDX-License-Identifier: Apache-2.0
"""Layers on two devices give what a model on one gives, for every method."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.hf import output_projection
from tests.helpers.budgets import NAMED, compressed
from tests.helpers.caches import positions
from tests.helpers.devices import FIRST, SECOND, Devices, MixedDevices, Placed, split
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.turns import two_padded_turns

FITTED = ("zap", "duo", "qfilter")  # their files are of float32
METHODS = [spec for spec in NAMED if not spec.startswith(FITTED)]
COMPOSED = [
    "knorm + match",
    "kvzip + match",
    "kvzip + level:rule=votes",
    "knorm + level:rule=mass",
    "kvzip + pages:size=8",
    "knorm + reindex",
    "snapkv:window=8 + kivi:group=8,residual=8",
    "adakv:window=8 + turboquant:residual=8,sinks=2",
    "pyramidkv:window=8 + adakv",
    "expected_attention + every:interval=4",
]


@pytest.fixture(scope="module")
def over_two() -> Iterator[PreTrainedModel]:
    with torch.no_grad(), Devices(), pytest.MonkeyPatch.context() as patched:
        # Plain weights are told from quantized ones by their class.
        patched.setattr(output_projection, "Tensor", Placed)
        yield split(build("llama", torch.float64), [FIRST, FIRST, SECOND, SECOND])


def turns(model: PreTrainedModel, spec: str) -> tuple[Tensor, list[Tensor], kvfold.Stats]:
    """Logits of two turns on a padded batch, and what the cache then holds."""
    cache = compressed(model, spec, 12, tokenizer=word_tokenizer())
    logits = two_padded_turns(model, cache, (24, 17, 9), max_new_tokens=4)
    return logits, positions(cache), cache.stats()


def test_tensors_of_two_devices_do_not_mix(over_two: PreTrainedModel) -> None:
    one, other = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
    for mixed in (other, torch.ones(2)):
        with pytest.raises(MixedDevices):
            one + mixed
    assert (one + other.to(FIRST)).tolist() == [2, 2] and (one + torch.tensor(1.0)).device == FIRST
    assert {each.device for each in over_two.parameters()} == {FIRST, SECOND}


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", [*METHODS, *COMPOSED])
def test_layers_on_two_devices_answer_as_on_one(over_two: PreTrainedModel, spec: str) -> None:
    logits, kept, stats = turns(over_two, spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(output_projection, "Tensor", Tensor)
        expected, own, size = turns(build("llama", torch.float64), spec)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert kept == own and stats == size


@pytest.mark.slow
def test_pairs_of_layers_that_share_a_tensor_are_refused_on_two_devices() -> None:
    with torch.no_grad(), Devices():
        model = split(build("llama", torch.float64), [FIRST, FIRST, FIRST, SECOND])
        with pytest.raises(kvfold.UnsupportedModel, match="ipu:0 and ipu:1: put them on one"):
            turns(model, "minicache:block=8")
