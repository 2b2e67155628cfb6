# SPDX-License-Identifier: Apache-2.0
"""Models whose output projection is known, and those that are refused before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from kvfold import (
    CompressedCache,
    KvfoldError,
    Method,
    Needs,
    Observation,
    Stages,
    UnsupportedModel,
)
from kvfold.cache.tensor_parallel import Ranks
from kvfold.hf.output_projection import OutputProjection
from kvfold.methods.base import Measured
from kvfold.observers.stored import OutputNorms
from tests.helpers.models import FAMILIES, build

GATED = ("qwen3_5",)


def sizes(observation: Observation) -> torch.Tensor:
    return observation.output_norms().mean(1, keepdim=True)


@dataclass(frozen=True)
class Reading(Method):
    """A method that reads norms of projected values."""

    def stages(self) -> Stages:
        return Stages(needs=Needs(OutputNorms("l2")), score=sizes)


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(GATED)))
def test_every_family_without_a_gate_is_known(family):
    model = build(family)
    CompressedCache(model, Reading(), 20)
    attention = [m for m in model.modules() if getattr(m, "layer_idx", None) == 1][-1]
    names = ("o_proj", "dense", "c_proj")
    own = next(getattr(attention, name) for name in names if hasattr(attention, name))
    assert OutputProjection(model, 1)._module() is own


@pytest.mark.parametrize("family", GATED)
def test_a_gate_before_the_projection_is_refused(family):
    model = build(family)
    with pytest.raises(UnsupportedModel, match="does not directly follow attention"):
        CompressedCache(model, Reading(), 20)
    CompressedCache(model, "knorm", 20)


class Adapted(nn.Linear):
    """A projection that does more than its weight says."""


def adapted(own: nn.Linear) -> nn.Module:
    return Adapted(own.in_features, own.out_features, bias=False)


def parametrized(own: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(own)


def of_eight_bits(own: nn.Linear) -> nn.Module:
    own.weight = nn.Parameter(own.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return own


def offloaded(own: nn.Linear) -> nn.Module:
    return own.to("meta")


@pytest.mark.parametrize("change", [adapted, parametrized, of_eight_bits, offloaded])
def test_a_weight_that_is_not_the_whole_projection_is_refused(change: Any):
    model = build("llama")
    CompressedCache(model, "knorm", 20)
    attention = model.model.layers[2].self_attn
    attention.o_proj = change(attention.o_proj)
    with pytest.raises(UnsupportedModel, match="output projection of layer 2"):
        CompressedCache(model, Reading(), 20)


def test_ranks_refuse_sizes_that_need_the_weights_of_all_heads():
    stages = Stages(needs=Needs(OutputNorms("l2")), allocate=Measured(sizes))
    with pytest.raises(KvfoldError, match="each rank holds some"):
        Ranks(0, 2, 4).joining(stages)
    Ranks().joining(stages)
