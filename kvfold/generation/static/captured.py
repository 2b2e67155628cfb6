# SPDX-License-Identifier: Apache-2.0
"""Decoding by one captured step, which is replayed for every token (docs/captured.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.generation.static.decode import (
    GraphCache,
    check_steps,
    generate_by,
    step_beyond_graphs,
)
from kvfold.generation.static.layer import StaticLayer
from kvfold.generation.static.recorder import Recorder, Step, recorder_for
from kvfold.generation.static.segments import StaticSegments
from kvfold.hf.compiling import compile_config
from kvfold.hf.models import text_config
from kvfold.hf.rotation import rope_types
from kvfold.hf.versions import CACHE, CACHE_NAMES
from kvfold.methods.base import Stages

# New tokens that buffers have room for: a step reads the room too, a new capture costs two steps.
BUCKET = 256


class CapturedCache(GraphCache):
    """The cache as `generate` sees it, whose static layers have room for a bucket of tokens."""

    def __init__(self, cache: CompressedCache, room: int) -> None:
        super().__init__(cache, room)
        self.to_come, self.made = room, 0  # tokens to be read, and how often layers were made
        self.left: float = 0  # steps that all layers have room for
        self.static: Cache | None = None  # as the captured forward sees it: no hook is told of it

    def fix(self) -> None:
        self.room = min(self.to_come, BUCKET)
        super().fix()
        self.left = min(layer.room for layer in self.layers if isinstance(layer, StaticLayer))
        self.static, self.made = Cache(layers=self.layers), self.made + 1

    def ragged(self, layer: CompressedLayer) -> StaticLayer:
        return StaticSegments(layer, self.room)

    def after_forward(self) -> None:
        if self.static is not None:
            self.left, self.to_come = self.left - 1, self.to_come - 1
        super().after_forward()

    def make_room(self) -> None:
        """Makes the layers anew if one has no room for a token, or is to encode entries."""
        if self.left <= 0:
            self.store()
            self.fix()


class CapturedStep:
    """A model's decode step over static tensors; captured anew where layers or inputs differ.

    The first step of a capture takes place as it is, the second one is recorded.
    """

    def __init__(self, model: PreTrainedModel, cache: CapturedCache, recorder: Recorder) -> None:
        self.model, self.cache, self.recorder = model, cache, recorder
        self.layout: Any = None
        self.held: list[Any] = []
        self.replay: Step | None = None

    def __call__(self, **inputs: Any) -> Any:
        """The forward's output for `inputs` as `generate` gives them."""
        own = [name for name in CACHE_NAMES if inputs.get(name) is self.cache]
        if not own or self.cache.static is None:
            return self.model(**inputs)
        self.cache.make_room()
        given, form = pytree.tree_flatten(inputs)
        layout = self.cache.made, form, [_layout(each) for each in given]
        if layout != self.layout:
            self.layout, self.replay = layout, None
            self.held = [each.clone() if isinstance(each, Tensor) else each for each in given]
            out = self.recorder.warm_up(lambda: self._step(form, own[0]))
        else:
            for held, each in zip(self.held, given, strict=True):
                if isinstance(held, Tensor):
                    held.copy_(each)
            if self.replay is None:
                self.replay = self.recorder.record(lambda: self._step(form, own[0]))
            out = self.replay()
        out = pytree.tree_map_only(Tensor, torch.clone, out)  # the next replay overwrites it
        for name in CACHE_NAMES:
            if out.get(name) is not None:
                out[name] = self.cache
        return out

    def _step(self, form: pytree.TreeSpec, own: str) -> Any:
        inputs = pytree.tree_unflatten(self.held, form)
        return self.model(**(inputs | {own: self.cache.static}))


def _layout(given: Any) -> Any:
    """What a capture fixes of an input."""
    return (given.shape, given.dtype) if isinstance(given, Tensor) else given


def decode_captured(new: int, model: PreTrainedModel, **options: Any) -> Any:
    """`model.generate` of at most `new` tokens, by steps that are captured and replayed.

    At least the last token of `input_ids` is still to be read. A step is transformers' eager
    forward over the static layers of `decode_compiled`; layers with a ragged store are read by
    `StaticSegments`. Work between steps, logits processors and sampling run outside of the graph.
    A graph is captured anew after `BUCKET` tokens, unless layers evict at every step, and when
    entries are encoded.

    Without a GPU the same steps run uncaptured.
    """
    cache: CompressedCache = options[CACHE]
    handed = CapturedCache(cache, room=max(0, new - 1))
    step = CapturedStep(model, handed, recorder_for(model.device))
    # `generate` asks for the call of a step only with one, whatever the device.
    options |= {"compile_config": compile_config(None)}
    return generate_by(lambda _: step, model, handed, options)


def check_captured(
    model: PreTrainedModel, cache: CompressedCache, settings: GenerationConfig
) -> None:
    """Raises KvfoldError or UnsupportedModel for steps that cannot be captured."""
    check_steps(model, cache, "capture=True", settings)
    if settings.compile_config is not None:
        raise KvfoldError("capture=True compiles nothing: leave compile_config out")
    name = type(model).__name__
    reason = reads_host(cache.method.stages())
    if reason is not None:
        raise KvfoldError(
            f"capture=True does not go with {cache.method}, which {reason}: leave capture out"
        )
    if "longrope" in rope_types(text_config(model)):
        raise UnsupportedModel(
            f"capture=True cannot be used as {name} asks at every step whether its text is long: "
            "leave capture out"
        )
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedModel(
            f"capture=True needs a model on one device, and {name} is on several: leave capture out"
        )


def reads_host(stages: Stages) -> str | None:
    """Work of a method's steps that waits for the host; None if there is none."""
    if stages.encode is not None and stages.encode.recalls:
        return "reads entries of the CPU's memory that each step chooses"
    return None


def eager_because(cache: CompressedCache) -> str | None:
    """Reason why `capture=True` does not go with a cache's method; None if steps are captured."""
    stages = cache.method.stages()
    return step_beyond_graphs(stages, cache.states[0].observers) or reads_host(stages)
