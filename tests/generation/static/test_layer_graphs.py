# SPDX-License-Identifier: Apache-2.0
"""One graph of a layer serves all layers, and later processes; other forwards run as ever."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

import kvfold
from kvfold.generation.static.layer_graphs import LayerGraphs, compiled_step, decoder_layers
from tests.helpers.budgets import compressed
from tests.helpers.compiled import ALONE, COMPILED, ENCODED, GREEDY, both, check_same, graphs
from tests.helpers.models import build, prompts

pytestmark = pytest.mark.slow
LAYERS = 4
KINDS = [
    "full",
    "snapkv:window=8",
    "pyramidkv:window=8",
    "h2o",
    "d2o",
    "adakv:window=8",
    ENCODED[0],
]


@pytest.fixture
def model() -> Any:
    torch._dynamo.reset()
    counters.clear()
    return build("llama", num_hidden_layers=LAYERS)


def products(graph: torch.fx.GraphModule) -> int:
    """Products with weights in a graph: a layer of Llama has seven."""
    return sum("linear" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.cases(3)
@pytest.mark.parametrize("spec", KINDS)
def test_all_layers_share_one_graph_of_a_layer(model, spec):
    made: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    name = f"counting_{id(made)}"  # of a configuration only texts are taken
    torch._dynamo.register_backend(counting, name=name)
    config = CompileConfig(fullgraph=True, backend=name, mode=None)
    caches = compressed(model, spec), compressed(model, spec)
    ids = prompts(ALONE)[0]
    expected = kvfold.generate(model, ids, cache=caches[0], **GREEDY)
    options = GREEDY | {"compile": True, "compile_config": config}
    assert torch.equal(kvfold.generate(model, ids, cache=caches[1], **options), expected)
    check_same(*caches)
    assert [products(graph) for graph in made] == [7]


def test_models_of_one_kind_share_it_too(model):
    for other in (model, build("llama", num_hidden_layers=2, seed=7)):
        outs, _ = both(other, "snapkv:window=8")
        assert torch.equal(*outs)
    assert graphs() == 1


def test_layers_that_differ_have_graphs_of_their_own(model):
    """What a graph takes for granted is asked of each layer."""
    model.model.layers[1].self_attn.scaling *= 3
    outs, caches = both(model, "snapkv:window=8")
    assert torch.equal(*outs)
    check_same(*caches)
    assert graphs() == 2


def test_a_layer_that_changes_between_two_answers_is_seen(model):
    both(model, "h2o")
    model.model.layers[2].mlp.act_fn = torch.nn.Tanh()
    outs, caches = both(model, "h2o")
    assert torch.equal(*outs)
    check_same(*caches)
    assert graphs() == 2


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3", "qwen3_moe", "olmo2"])
@pytest.mark.whole
def test_layers_of_other_families_share_one_too(name):
    torch._dynamo.reset()
    counters.clear()
    model = build(name)
    if name == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
    outs, caches = both(model, "snapkv:window=8")
    assert torch.equal(*outs)
    check_same(*caches)
    assert graphs() == 1 and decoder_layers(model) is not None


def test_hooks_inside_layers_are_traced_with_the_whole(model):
    """transformers keeps those by which it hands out attention, which ask what runs around them."""
    model(prompts(ALONE)[0], output_attentions=True)
    assert decoder_layers(model) is None
    outs, caches = both(model, "snapkv:window=8")
    assert torch.equal(*outs)
    check_same(*caches)
    assert graphs() == 1


def test_layers_with_a_forward_of_their_own_are_left_alone(model):
    layer = model.model.layers[0]
    layer.forward = layer.forward
    assert decoder_layers(model) is None
    assert not isinstance(compiled_step(model, COMPILED["compile_config"]), LayerGraphs)


def test_other_caches_read_as_ever_meanwhile(model):
    """Another thread may read with the model while a graph's step runs."""
    ids = prompts(ALONE)[0]
    expected = model(ids).logits
    step = compiled_step(model, COMPILED["compile_config"])
    with step._layers_replaced():
        assert torch.equal(model(ids, past_key_values=DynamicCache()).logits, expected)
    assert graphs() == 0


def test_a_model_is_itself_again_afterwards(model):
    class Failing:
        def put(self, tokens: torch.Tensor) -> None:
            if tokens.numel() == 1:
                raise RuntimeError("the line is dead")

    both(model, "h2o")
    cache, ids = compressed(model, "h2o"), prompts(ALONE)[0]
    with pytest.raises(RuntimeError, match="the line is dead"):
        kvfold.generate(model, ids, cache=cache, streamer=Failing(), **COMPILED, **GREEDY)
    assert "get_compiled_call" not in vars(model)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


PROGRAM = """
import torch
from torch._dynamo.utils import counters
import kvfold
from tests.helpers.budgets import compressed
from tests.helpers.compiled import ALONE, GREEDY
from tests.helpers.models import build, prompts

model, ids = build("llama", num_hidden_layers=3), prompts(ALONE)[0]
for spec in ("snapkv:window=8", "h2o", "adakv:window=8"):
    eager, compiled = compressed(model, spec), compressed(model, spec)
    expected = kvfold.generate(model, ids, cache=eager, **GREEDY)
    got = kvfold.generate(model, ids, cache=compiled, compile=True, **GREEDY)
    assert torch.equal(got, expected), spec
found = counters["inductor"]
print(counters["stats"]["unique_graphs"], found["fxgraph_cache_miss"], found["fxgraph_cache_hit"])
"""


@pytest.mark.whole
def test_a_second_process_finds_the_graphs_of_the_first(tmp_path, monkeypatch):
    """By torch's own counters: graphs traced, compiled, and read from the disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert told == [["3", "3", "0"], ["3", "0", "3"]]
