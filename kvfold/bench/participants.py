# SPDX-License-Identifier: Apache-2.0
"""What takes part in a run: the full cache, kvfold's methods; peers have the same face."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.bench.baseline import full_cache, full_twin
from kvfold.bench.clock import compression_watched, seconds
from kvfold.bench.peak import can_measure, peak_of
from kvfold.bench.sdpa_variants import Kernels
from kvfold.bench.shapes import Subject
from kvfold.cache.cache import CompressedCache
from kvfold.generation.generate import read_turn
from kvfold.generation.static.decode import FixedCache, check_compiled
from kvfold.hf.compiling import compiled_call

FULL, AGAIN = "full", "full again"


@dataclass(frozen=True)
class Label:
    """Who is measured: the side ("baseline", "kvfold" or a peer), its method, its budget.

    `compiled`: whether it decodes by one compiled graph.
    """

    side: str
    method: str
    budget: str | None = None
    compiled: bool = False

    @property
    def is_peer_full(self) -> bool:
        """Whether it is a peer's own full cache, which that peer's methods are measured against."""
        return self.side not in ("baseline", "kvfold") and self.method == FULL

    def __str__(self) -> str:
        side = "" if self.side in ("baseline", "kvfold") else f"{self.side} "
        budget = "" if self.budget is None else f", {self.budget}"
        return f"{side}{self.method}{budget}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class Prefill:
    """Seconds to the first token, those of them in compression, and the peak in bytes.

    The peak is what the prompt took beyond what was there before it, itself included; None where
    the process cannot tell.
    """

    seconds: float
    compression: float
    peak: int | None


@dataclass(frozen=True)
class Held:
    """Bytes of a cache, and the part of the entries it kept."""

    nbytes: int
    kept: float


class Side(Protocol):
    """One participant: reads a prompt, then makes single steps when it is its turn."""

    label: Label

    def prefill(self, ids: Tensor, room: int) -> Prefill:
        """Reads `ids [B, N]` to the first token; `room` more tokens will follow."""

    def step(self, tokens: Tensor) -> float:
        """Seconds for one token more in each row, `tokens [B, 1]`."""

    def held(self) -> Held:
        """What the cache holds now."""

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        """The prefill's peak in a fresh process; None where `prefill` tells it, or nobody can."""

    def free(self) -> None:
        """Forgets the cache."""


class LocalSide:
    """A side in this process."""

    def __init__(self, label: Label, subject: Subject, model: PreTrainedModel) -> None:
        self.label, self.subject, self.model = label, subject, model
        self.cache: Any = None

    @abstractmethod
    def make(self, room: int) -> Any:
        """An empty cache."""

    def read(self, ids: Tensor) -> None:
        """Fills the cache and computes the first token's logits."""
        self.forward(ids)

    def forward(self, ids: Tensor) -> None:
        """One forward over `ids [B, S]`, with the last token's logits."""
        self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def prefill(self, ids: Tensor, room: int) -> Prefill:
        self.free()
        self.cache = self.make(room)
        device, ids = self.model.device, ids.to(self.model.device)
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        with compression_watched(device) as watch:
            taken = seconds(device, lambda: self.read(ids))
        peak = None
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - before
        return Prefill(taken, watch.total(), peak)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> float:
        tokens = tokens.to(self.model.device)
        return seconds(self.model.device, lambda: self.forward(tokens))

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        if self.model.device.type != "cpu" or not can_measure():
            return None
        return peak_of(self.spec(), batch, length, room)

    def spec(self) -> dict[str, Any]:
        """What another process needs to know to take this side's part."""
        source, label = self.subject.source, self.label
        return source.model_dump() | dataclasses.asdict(label)

    def free(self) -> None:
        self.cache = None

    @abstractmethod
    def held(self) -> Held: ...


class FullSide(LocalSide):
    """Keeps everything, with the fastest attention; `method` is its name in the records."""

    def __init__(self, subject: Subject, kernels: Kernels, method: str = FULL) -> None:
        model = full_twin(subject.model, kernels)
        super().__init__(Label("baseline", method), subject, model)
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

    def held(self) -> Held:
        layers = [layer for layer in self.cache.layers if hasattr(layer, "nbytes")]
        return Held(sum(layer.nbytes() for layer in layers), 1.0)


class MethodSide(LocalSide):
    """A method of kvfold within a budget."""

    def __init__(self, subject: Subject, method: str, budget: str | None) -> None:
        super().__init__(Label("kvfold", method, budget), subject, subject.model)
        self.cache = self.make(0)  # refuses now what cannot work

    def make(self, room: int) -> CompressedCache:
        return CompressedCache(
            self.model,
            self.label.method,
            self.label.budget,
            tokenizer=self.subject.tokenizer,
            seed=self.subject.source.seed,
        )

    def read(self, ids: Tensor) -> None:
        """As `kvfold.generate` does: with forwards of its own, a method leaves the last token."""
        if self.cache.runs_own_forwards:
            total = ids.shape[1]
            read_turn(self.model, self.cache, ids[:, :-1], None, until=total, chunk=total)
            ids = ids[:, -1:]
        self.forward(ids)

    def held(self) -> Held:
        stats = self.cache.stats()
        return Held(stats.nbytes, stats.kept_fraction)


class CompiledSide(MethodSide):
    """The same, but it decodes by one compiled graph; raises KvfoldError where it cannot."""

    def __init__(self, subject: Subject, method: str, budget: str | None) -> None:
        super().__init__(subject, method, budget)
        self.label = dataclasses.replace(self.label, compiled=True)
        check_compiled(self.model, self.cache, {})
        self.fixed: FixedCache | None = None

    def prefill(self, ids: Tensor, room: int) -> Prefill:
        taken = super().prefill(ids, room)
        self.fixed = FixedCache(self.cache, room)
        self.fixed.fix()
        return taken

    @torch.no_grad()
    def step(self, tokens: Tensor) -> float:
        tokens = tokens.to(self.model.device)
        return seconds(self.model.device, lambda: self._next(tokens))

    def _next(self, tokens: Tensor) -> None:
        assert self.fixed is not None
        forward = compiled_call(self.model)
        forward(input_ids=tokens, past_key_values=self.fixed, use_cache=True, logits_to_keep=1)
        self.fixed.after_forward()

    def peak_alone(self, batch: int, length: int, room: int) -> None:
        """That of the same method's eager side: the prompt is never compiled."""

    def held(self) -> Held:
        assert self.fixed is not None
        stats = self.cache.stats()
        return Held(self.fixed.nbytes() + stats.state_bytes, stats.kept_fraction)

    def free(self) -> None:
        super().free()
        self.fixed = None
