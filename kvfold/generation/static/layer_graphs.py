# SPDX-License-Identifier: Apache-2.0
"""Compiled decode steps: on a CPU one graph of a layer, shared by all layers that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.generation.static.layer import StaticLayer
from kvfold.hf.models import text_config


def compiled_step(model: PreTrainedModel, config: CompileConfig) -> Callable[..., Any]:
    """The model's forward for decode steps with a cache of static layers.

    On a CPU layers are graphs and what lies around them is eager. The whole is one graph on a GPU,
    where the host's share would show, and where layers are not found or were changed.
    """
    layers = decoder_layers(model)
    if model.device.type != "cpu" or layers is None:
        return type(model).get_compiled_call(model, config)
    return LayerGraphs(model, layers, config)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module] | None:
    """The modules that are the decoder's layers; None if there is none for each layer.

    Also None if one has a forward of its own, as that of accelerate, which moves weights, or hooks
    inside, as those by which transformers hands out attention: they may ask what is outside.
    """
    count = text_config(model).num_hidden_layers
    lists = (each for each in model.get_decoder().children() if isinstance(each, nn.ModuleList))
    layers = next((list(each) for each in lists if len(each) == count), None)
    if layers is None or any("forward" in vars(layer) for layer in layers):
        return None
    inner = itertools.chain.from_iterable(layer.children() for layer in layers)
    parts = itertools.chain.from_iterable(child.modules() for child in inner)
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return None if hooked else layers


class LayerGraphs:
    """A forward whose layers run as graphs; torch makes one for each kind of layer.

    A layer is given its static layer in place of the cache: an index into the cache would be a
    constant of the graph.
    """

    def __init__(
        self, model: PreTrainedModel, layers: list[nn.Module], config: CompileConfig
    ) -> None:
        self.model, self.layers = model, layers
        self.graph = _graph(config)

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._layers_replaced():
            return self.model(*args, **options)

    @contextmanager
    def _layers_replaced(self) -> Iterator[None]:
        """While it lasts, layers run as graphs; other caches, as of other threads, run as ever."""
        for index, layer in enumerate(self.layers):
            vars(layer)["forward"] = partial(self._forward, index, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    def _forward(self, index: int, layer: nn.Module, *args: Any, **options: Any) -> Any:
        own = [_own_layer(index, value) for value in args]
        named = {name: _own_layer(index, value) for name, value in options.items()}
        static = any(isinstance(value, StaticLayer) for value in (*own, *named.values()))
        return (self.graph if static else _run)(layer, *own, **named)


def _own_layer(index: int, value: Any) -> Any:
    """The static layer at `index` in place of a cache that has one; other values as they are."""
    # transformers' own caches begin without layers.
    layers = value.layers[index : index + 1] if isinstance(value, Cache) else []
    return layers[0] if layers and isinstance(layers[0], StaticLayer) else value


_made: list[tuple[dict[str, Any], Callable[..., Any]]] = []


def _graph(config: CompileConfig) -> Callable[..., Any]:
    """`_run`, compiled; one for each configuration, as torch keeps all that it ever made."""
    settings = config.to_dict()
    for known, graph in _made:
        if known == settings:
            return graph
    _made.append((settings, torch.compile(_run, **settings)))
    return _made[-1][1]


def _run(layer: nn.Module, *args: Any, **options: Any) -> Any:
    """The layer's own forward. The layer is an argument: graphs belong to a function's code."""
    return type(layer).forward(layer, *args, **options)
