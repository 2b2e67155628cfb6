# SPDX-License-Identifier: Apache-2.0
"""Participants of a run: the protocol `Participant`, the full cache, and kvfold's methods."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.bench.baseline import full_cache, full_twin
from kvfold.bench.models import BenchModel
from kvfold.bench.sdpa_variants import SdpaChoice
from kvfold.cache.cache import CompressedCache
from kvfold.fitted.numbers import NO_FILE, FileName
from kvfold.fitted.of_model import write_fitted
from kvfold.generation.reading import read_turn
from kvfold.generation.static.decode import GraphCache, check_steps
from kvfold.generation.static.layer_graphs import compiled_step
from kvfold.hf.compiling import compile_config
from kvfold.hf.versions import CACHE
from kvfold.measure.clock import compression_watched, seconds
from kvfold.measure.peak import allocated, can_measure, peak_above, peak_of
from kvfold.methods.base import Method, parse
from kvfold.methods.stages.score.learned import Scorer
from kvfold.methods.zap import Zap
from kvfold.methods.zap_threshold import ZapThreshold

FULL, AGAIN = "full", "full again"


PROJECTIONS = 64  # a fit chooses none, 64 or 256


@dataclass(frozen=True)
class ParticipantLabel:
    """Name of a participant: its side ("baseline", "kvfold" or a peer), method and budget.

    `compiled` is true if decode steps run as compiled graphs.
    """

    side: str
    method: str
    budget: str | None = None
    compiled: bool = False

    @property
    def is_peer_full(self) -> bool:
        """True for a peer's full cache, the reference for that peer's methods."""
        return self.side not in ("baseline", "kvfold") and self.method == FULL

    def __str__(self) -> str:
        side = "" if self.side in ("baseline", "kvfold") else f"{self.side} "
        budget = "" if self.budget is None else f", {self.budget}"
        return f"{side}{self.method}{budget}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class PrefillCost:
    """Seconds to the first token, compression seconds among them, and peak memory in bytes.

    The peak is above the memory allocated before the prefill; None if it cannot be measured in
    this process (CPU).
    """

    seconds: float
    compression: float
    peak: int | None


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache, and entries stored over entries seen."""

    nbytes: int
    kept: float


class Participant(Protocol):
    """One participant: a prefill, then decode steps one at a time."""

    label: ParticipantLabel

    def prefill(self, ids: Tensor, room: int) -> PrefillCost:
        """Prefill of `ids [B, N]` up to the first token's logits; at most `room` steps follow."""

    def step(self, tokens: Tensor) -> float:
        """Seconds of one decode step with `tokens [B, 1]`."""

    def cache_size(self) -> CacheSize:
        """Current size of the cache."""

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        """Peak bytes of a prefill in a fresh process.

        None if `prefill` measures it itself (GPU), or the system cannot.
        """

    def free(self) -> None:
        """Drops the cache."""


class LocalParticipant:
    """A participant that runs in this process."""

    def __init__(
        self, label: ParticipantLabel, subject: BenchModel, model: PreTrainedModel
    ) -> None:
        self.label, self.subject, self.model = label, subject, model
        self.cache: Any = None

    @abstractmethod
    def make(self, room: int) -> Any:
        """An empty cache."""

    def read(self, ids: Tensor) -> None:
        """Prefill: fills the cache with `ids [B, N]` and computes the first token's logits."""
        self.forward(ids)

    def forward(self, ids: Tensor) -> None:
        """One forward over `ids [B, S]`, logits of the last token only."""
        self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})

    @torch.no_grad()
    def prefill(self, ids: Tensor, room: int) -> PrefillCost:
        self.free()
        self.cache = self.make(room)
        device, ids = self.model.device, ids.to(self.model.device)
        before = allocated(device)
        with compression_watched(device) as watch:
            taken = seconds(device, lambda: self.read(ids))
        return PrefillCost(taken, watch.total(), peak_above(device, before))

    @torch.no_grad()
    def step(self, tokens: Tensor) -> float:
        tokens = tokens.to(self.model.device)
        return seconds(self.model.device, lambda: self.forward(tokens))

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        if self.model.device.type != "cpu" or not can_measure():
            return None
        work = {"batch": batch, "length": length, "room": room}
        return peak_of("kvfold.bench.peak", self.spec() | work, self.label.method)

    def spec(self) -> dict[str, Any]:
        """JSON-serialisable description from which `bench.peak` rebuilds this participant."""
        source, label = self.subject.source, self.label
        return source.model_dump() | dataclasses.asdict(label)

    def free(self) -> None:
        self.cache = None

    @abstractmethod
    def cache_size(self) -> CacheSize: ...


class FullParticipant(LocalParticipant):
    """The full cache with the fastest SDPA variant; `method` is its name in the records."""

    def __init__(self, subject: BenchModel, kernels: SdpaChoice, method: str = FULL) -> None:
        model = full_twin(subject.model, kernels)
        super().__init__(ParticipantLabel("baseline", method), subject, model)
        self.kernels = kernels

    def make(self, room: int) -> Cache:
        return full_cache(self.model, room)

    def forward(self, ids: Tensor) -> None:
        kernel = self.kernels.decode if ids.shape[1] == 1 else self.kernels.prefill
        with kernel.chosen():
            super().forward(ids)

    def spec(self) -> dict[str, Any]:
        layouts = {"prefill": self.kernels.prefill.layout, "decode": self.kernels.decode.layout}
        return super().spec() | layouts

    def cache_size(self) -> CacheSize:
        layers = [layer for layer in self.cache.layers if hasattr(layer, "nbytes")]
        return CacheSize(sum(layer.nbytes() for layer in layers), 1.0)


class MethodParticipant(LocalParticipant):
    """A method of kvfold at a budget; raises KvfoldError if the pair or the model does not work."""

    def __init__(self, subject: BenchModel, method: str, budget: str | None) -> None:
        super().__init__(ParticipantLabel("kvfold", method, budget), subject, subject.model)
        self.folder = TemporaryDirectory(prefix="kvfold-bench-")
        self.method = _runnable(method, subject, Path(self.folder.name))
        self.cache = self.make(0)  # checks method, budget and model now

    def make(self, room: int) -> CompressedCache:
        return CompressedCache(
            self.model,
            self.method,
            self.label.budget,
            tokenizer=self.subject.tokenizer,
            seed=self.subject.source.seed,
        )

    def read(self, ids: Tensor) -> None:
        """Prefill as in `kvfold.generate`.

        A method with forwards of its own reads all but the last token itself, and the last one in
        an ordinary forward.
        """
        if self.cache.runs_own_forwards:
            read_turn(self.model, self.cache, ids[:, :-1], until=ids.shape[1])
            ids = ids[:, -1:]
        self.forward(ids)

    def cache_size(self) -> CacheSize:
        stats = self.cache.stats()
        return CacheSize(stats.nbytes, stats.kept_fraction)


def _runnable(method: str, subject: BenchModel, folder: Path) -> Method:
    """The method as it can run on the subject: zap without a file gets a random scorer.

    On models of random weights only, which nothing was fitted to. The file lies in `folder`.
    """
    parsed = parse(method)
    if subject.source.config is None or not isinstance(parsed, Zap | ZapThreshold):
        return parsed
    if parsed.file != NO_FILE:
        return parsed
    path = folder / "scorer.safetensors"
    write_fitted(path, _scorer(subject), subject.model, written_by="", target="random", texts=0)
    return dataclasses.replace(parsed, file=FileName(path))


def _scorer(subject: BenchModel) -> Scorer:
    """Random weights in the shape that a fit gives them, by the subject's seed."""
    shape, draw = subject.shape, torch.Generator().manual_seed(subject.source.seed)
    features = 2 * shape.head_size + 3
    sizes = (shape.layers, shape.kv_heads, features + PROJECTIONS)
    return Scorer(
        torch.randn(sizes, generator=draw),
        torch.ones(*sizes[:2], features),
        torch.randn(features, PROJECTIONS, generator=draw) / features**0.5,
    )


class CompiledParticipant(MethodParticipant):
    """A method whose decode steps run as compiled graphs; raises KvfoldError if it cannot."""

    def __init__(self, subject: BenchModel, method: str, budget: str | None) -> None:
        super().__init__(subject, method, budget)
        self.label = dataclasses.replace(self.label, compiled=True)
        check_steps(self.model, self.cache, "compile=True", GenerationConfig())  # its own steps
        self.graph_cache: GraphCache | None = None
        self.compiled_step = compiled_step(self.model, compile_config(None))

    def prefill(self, ids: Tensor, room: int) -> PrefillCost:
        taken = super().prefill(ids, room)
        self.graph_cache = GraphCache(self.cache, room)
        self.graph_cache.fix()
        return taken

    def forward(self, ids: Tensor) -> None:
        """The prompt as without a graph, and then a token."""
        if self.graph_cache is None:
            super().forward(ids)
            return
        options = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        self.compiled_step(**options, **{CACHE: self.graph_cache})
        self.graph_cache.after_forward()

    def peak_alone(self, batch: int, length: int, room: int) -> None:
        """None: the prompt is never compiled, so the eager participant's peak holds here too."""

    def cache_size(self) -> CacheSize:
        assert self.graph_cache is not None
        stats = self.cache.stats()
        return CacheSize(self.graph_cache.nbytes() + stats.state_bytes, stats.kept_fraction)

    def free(self) -> None:
        super().free()
        self.graph_cache = None
