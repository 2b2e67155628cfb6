# SPDX-License-Identifier: Apache-2.0
"""Decoding by compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention import handshake
from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.generation.static.compiler import compiling
from kvfold.generation.static.evicting import StaticEvicting
from kvfold.generation.static.layer import StaticDense, StaticLayer
from kvfold.generation.static.layer_graphs import compiled_step
from kvfold.generation.static.ragged import StaticRagged
from kvfold.hf.compiling import compile_config, not_compiled_because
from kvfold.hf.decode_steps import Call, decode_steps_by
from kvfold.hf.forward_hooks import ToldOfForwards
from kvfold.hf.models import stock_generate
from kvfold.hf.versions import CACHE
from kvfold.methods.base import Stages
from kvfold.methods.stages.when import Hold, Once
from kvfold.observers.of_layer import Observers
from kvfold.observers.surprise import SurpriseNeed

# New tokens that `generate` produces by default
NEW_TOKENS = 20


class GraphCache(Cache, ToldOfForwards):
    """The cache as `generate` sees it: its own layers at first, static layers from `fix` on."""

    def __init__(self, cache: CompressedCache, room: int) -> None:
        super().__init__(layers=list(cache.layers))
        self.cache, self.room = cache, room
        self.seen: int | None = None  # columns read by completed forwards

    @property
    def is_compileable(self) -> bool:
        """True: `generate` compiles decode steps only, never the prompt's forward."""
        return True

    def fix(self) -> None:
        """Replaces the layers by static ones, once the prompt is read."""
        self.layers = [self.fixed(layer) for layer in self.cache.compressed_layers]
        self.seen = self.cache.get_seq_length()

    def fixed(self, layer: CompressedLayer) -> StaticLayer:
        """Static layer of a layer between two forwards, with room for `room` more tokens."""
        state = layer.state
        if not state.stored().is_dense:
            return self.ragged(layer)
        if isinstance(state.plan.stages.when, Hold) and not state.phase.frozen:
            return StaticEvicting(layer, self.room)
        return StaticDense(layer, self.room)

    def ragged(self, layer: CompressedLayer) -> StaticLayer:
        """Static layer of one with a ragged store."""
        return StaticRagged(layer)

    def forward_begins(self, ids: Tensor | None, mask: Tensor | None, new: int) -> None:
        """Tells the cache of a forward that reads the prompt; its mask is transformers'."""
        if not torch.compiler.is_compiling() and self.seen is None:
            self.cache.forward_begins(ids, None, new)

    def forward_returned(self, ids: Tensor | None, logits: Tensor | None) -> None:
        """Tells the cache of a returned forward that has read the prompt."""
        if not torch.compiler.is_compiling() and self.seen is None:
            self.cache.forward_returned(ids, logits)

    def after_forward(self) -> None:
        """Runs the layers' work between steps, outside of the graph."""
        fixed = [layer for layer in self.layers if isinstance(layer, StaticLayer)]
        for layer in fixed:
            layer.between_steps()
        if self.seen is None:
            self.fix()
        else:
            self.seen += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        if not isinstance(layer, StaticLayer):
            return self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        return layer.update(key_states, value_states)

    def nbytes(self) -> int:
        """Bytes of all static layers."""
        counted: set[int] = set()
        layers = [layer for layer in self.layers if isinstance(layer, StaticLayer)]
        return sum(layer.nbytes(counted) for layer in layers)

    def store(self) -> None:
        """Has the cache's own layers hold what the static ones hold."""
        for layer, own in zip(self.layers, self.cache.compressed_layers, strict=True):
            if isinstance(layer, StaticLayer):
                layer.hand_back(own)

    def hand_back(self) -> None:
        """Brings the cache to the state that eager decoding would have left, after errors too."""
        handshake.forget()
        self.store()
        if self.seen is not None and self.cache.get_seq_length() > self.seen:
            self.cache.forward_failed(self.seen)


class _AfterForward:
    """A logits processor that changes nothing: `generate` calls it after each forward."""

    def __init__(self, cache: GraphCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.cache.after_forward()
        return scores


def generate_by(
    choose: Callable[[CompileConfig], Call],
    model: PreTrainedModel,
    handed: GraphCache,
    options: dict[str, Any],
) -> Any:
    """`model.generate` over static layers, which are handed back to the cache in the end.

    `choose` makes the steps' call, as of `decode_steps_by`. The first of the `logits_processor`
    notes which rows have ended.
    """
    noting, *processors = options["logits_processor"]
    # Before the caller's, which may fail.
    processors = [noting, _AfterForward(handed), *processors]
    given = options | {CACHE: handed, "logits_processor": processors}
    try:
        with decode_steps_by(model, choose):
            out = stock_generate(model, **given)
    finally:
        handed.hand_back()
    if not isinstance(out, Tensor):
        setattr(out, CACHE, handed.cache)
    return out


def decode_compiled(new: int, model: PreTrainedModel, **options: Any) -> Any:
    """`model.generate` of at most `new` tokens, by graphs without breaks for all decode steps.

    At least the last token of `input_ids` is still to be read. Layers by kind:

    - Dense, nothing evicted: room for all new tokens; unused room is given back.
    - Dense, evicting at every step: room for some tokens; kept entries move together when it is
      used up. Random draws (`Observation.seed`) are the same at every step.
    - Ragged: eager, each in one operation of the graph.

    A new graph is made for one row and for several, for dense and for ragged layers, and for each
    method that evicts; the number of kept entries needs none. A `compile_config` among the options
    replaces transformers' default, which on a GPU means CUDA graphs; that was not run.
    """
    cache: CompressedCache = options[CACHE]
    handed = GraphCache(cache, room=max(0, new - 1))
    configs = (options.get("generation_config"), model.generation_config)
    asked = [options.get("compile_config"), *(getattr(c, "compile_config", None) for c in configs)]
    options |= {"compile_config": compile_config(next(filter(None, asked), None))}
    with compiling():
        return generate_by(partial(compiled_step, model), model, handed, options)


def check_steps(
    model: PreTrainedModel, cache: CompressedCache, option: str, settings: GenerationConfig
) -> None:
    """Raises KvfoldError or UnsupportedModel if a graph cannot do the work of each step.

    `option` asked for the graph, and is named.
    """
    if settings.disable_compile:  # transformers calls the model itself
        raise KvfoldError(f"{option} does not go with disable_compile=True: choose one of them")
    name = option.removesuffix("=True")
    reason = step_beyond_graphs(cache.method.stages(), cache.states[0].observers)
    if reason is not None:
        raise KvfoldError(
            f"{option} does not go with {cache.method}, which {reason}: leave {name} out"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise KvfoldError(
            f"{option} does not go with torch.autocast, which gives keys and values of two "
            f"dtypes: leave {name} out, or load the model in 16 bits"
        )
    kind = type(model).__name__
    if len(cache.compressed_layers) < len(cache.layers):
        raise UnsupportedModel(
            f"{option} needs a model all of whose layers attend to their whole past, but some "
            f"of {kind} have a sliding window or a recurrent state: leave {name} out"
        )
    reason = not_compiled_because(model)
    if reason is not None:
        raise UnsupportedModel(f"{option} cannot be used as {kind} {reason}: leave {name} out")
    if (settings.num_beams or 1) > 1:
        raise KvfoldError(f"{option} is for greedy decoding and sampling, not for beams")


def step_beyond_graphs(stages: Stages, observers: Observers) -> str | None:
    """Work of a method's steps that a graph cannot do; None if there is none."""
    if stages.positions == "reindex":
        return "moves its sinks at every step"
    if isinstance(stages.when, Hold):
        alone = stages.merge is None or stages.merge.one is not None
        if stages.needs.beyond_attention or not observers.only_sums:
            return "reads more than entries and attention at every step"
        return None if alone else "merges an evicted entry into many others at every step"
    if stages.rounds is not None:
        return f"evicts many entries at once after every {stages.rounds.every} tokens"
    if isinstance(stages.when, Once):
        return "may still compress the prompt at every step"
    if SurpriseNeed in stages.needs:
        return "reads the logits of each token at every step"
    if not observers.only_sums:
        return "notes more than attention at every step"
    return "adds up attention at every step" if observers.of_forwards else None
