# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention modules, noted for a block."""

import pytest
import torch
from torch import nn

from kvfold import KvfoldError
from kvfold.hf.attention_inputs import inputs_noted
from kvfold.hf.models import attention_module
from tests.helpers.models import build


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_input_is_behind_the_layers_norm(architecture):
    model = build(architecture, torch.float64)
    layers = range(model.config.num_hidden_layers)
    noted, given = {}, []
    norm = next(m for n, m in model.named_modules() if n.endswith(("input_layernorm", "ln_1")))
    norm.register_forward_hook(lambda module, args, out: given.append(out))
    modules = [attention_module(model, layer) for layer in layers]
    ids = torch.arange(3, 8)[None]
    with inputs_noted(modules, noted.__setitem__):
        model(ids)
    assert list(noted) == list(layers) and noted[0].shape[:2] == (1, 5)
    assert torch.equal(noted[0], given[0])
    noted.clear()
    model(ids)
    assert not noted


def test_layers_without_such_an_input_are_refused():
    module = nn.Linear(2, 2)
    refused = pytest.raises(KvfoldError, match="no attention module in layer 1")
    with refused, inputs_noted([module, None], print):
        pass
    assert not module._forward_pre_hooks
    with inputs_noted([module], print), pytest.raises(KvfoldError, match="without hidden states"):
        module(input=torch.ones(2))
