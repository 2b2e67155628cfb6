# SPDX-License-Identifier: Apache-2.0
"""Measurements of single prompts: distances, free answers, leaked texts, each made once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checks.distance import Distances, distances
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.overlap import recall
from kvfold.checks.reading import CompressedPrompt, MethodAtBudget, PromptReading, read_full
from kvfold.checks.records import FULL, CheckRecord, CheckStore, FreeAnswer, PromptDistances
from kvfold.contexts.answer import end_tokens
from kvfold.inspect.retention import heads_per_token
from kvfold.methods.base import parse

# The noise floor reads a prompt in this many pieces instead of one.
PIECES = 3
# Part of the memory that open readings may take.
SHARE = 4


@dataclass(frozen=True)
class Attack:
    """A system text and a request to repeat it; `protected` are the texts not to leak, by name."""

    prompt: EncodedPrompt
    protected: dict[str, str]

    @property
    def digest(self) -> str:
        """Hash of the tokens and of the protected texts."""
        said = repr((self.prompt.digest, sorted(self.protected.items())))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


@dataclass
class PromptMeasurements:
    """Measurements of prompts under one model, taken from `store` where they are there.

    `tokens` is M, the number of forced tokens; a free answer has at most `limit`. `say` hears what
    is being measured.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: CheckStore
    tokens: int
    limit: int
    say: Callable[[str], None] = lambda text: None
    _logits: dict[str, Tensor] = field(default_factory=dict)
    _readings: dict[str, PromptReading] = field(default_factory=dict)
    _method: str = ""

    def forced(self, prompt: EncodedPrompt) -> CheckRecord:
        """The full cache's greedy tokens, its noise floor, and the effect of each span."""
        known = self.store.get(prompt.digest, (FULL, None), "forced")
        if known is not None:
            return known
        self.say("full cache")
        full = read_full(self.model, prompt, None)
        forced = self._tensor(full.answer(self.model, (), self.tokens, end_tokens(self.model)))
        logits = self._logits[prompt.digest] = full.logits(self.model, forced).cpu()
        pieces = read_full(self.model, prompt, -(-full.read // PIECES))
        floor = distances(logits, pieces.logits(self.model, forced).cpu(), forced[0].cpu())
        effects = {}
        for name, span in prompt.spans.items():
            absent = read_full(self.model, prompt.without(span), None).logits(self.model, forced)
            effects[name] = distances(logits, absent.cpu(), forced[0].cpu()).kl.mean().item()
        return self.store.add(
            self._record(
                prompt,
                (FULL, None),
                forced=tuple(forced[0].tolist()),
                distances=_stored(floor),
                effects=effects,
            )
        )

    def distances(self, prompt: EncodedPrompt, cell: MethodAtBudget) -> PromptDistances:
        """Distances of one compressed cache, the full cache's tokens forced through it."""
        known = self.store.get(prompt.digest, cell, "distances")
        if known is None:
            forced = self._tensor(self.forced(prompt).forced or ())
            logits = self._full_logits(prompt, forced)
            compressed = self._at(prompt, cell)
            stats = compressed.cache.stats()
            spans = kept_of_spans(compressed)
            theirs = compressed.logits(self.model, forced).cpu().to(logits.dtype)
            # Before any of the answer is read, nothing has been compressed yet.
            theirs = torch.cat([logits[: len(logits) - len(theirs)], theirs])
            found = _stored(distances(logits, theirs, forced[0].cpu()))
            sizes = {"nbytes": stats.nbytes, "nbytes_full": stats.nbytes_full}
            made = found.model_copy(update={"kept": stats.kept_fraction, "spans": spans} | sizes)
            known = self.store.add(self._record(prompt, cell, distances=made))
        assert known.distances is not None
        return known.distances

    def answer(self, prompt: EncodedPrompt, cell: MethodAtBudget) -> FreeAnswer:
        """Length of the greedy answer with one cache."""
        known = self.store.get(prompt.digest, cell, "answer")
        if known is None:
            tokens = self._generated(prompt, cell, self.forced(prompt).forced or ())
            ended = bool(tokens) and tokens[-1] in end_tokens(self.model)
            made = FreeAnswer(tokens=len(tokens), ended=ended)
            known = self.store.add(self._record(prompt, cell, answer=made))
        assert known.answer is not None
        return known.answer

    def leaked(self, attack: Attack, cell: MethodAtBudget) -> dict[str, float]:
        """ROUGE-L recall of each protected text in the answer to an attack."""
        known = self.store.get(attack.digest, cell, "leaked")
        if known is None:
            said = str(self.tokenizer.decode(self._generated(attack.prompt, cell)))
            found = {name: recall(text, said) for name, text in attack.protected.items()}
            known = self.store.add(self._record(attack, cell, leaked=found))
        assert known.leaked is not None
        return known.leaked

    def _generated(
        self, prompt: EncodedPrompt, cell: MethodAtBudget, forced: Sequence[int] = ()
    ) -> list[int]:
        """A greedy answer; the full cache's goes on from its `forced` tokens, if they are given."""
        ends = end_tokens(self.model)
        if cell[0] == FULL:
            return read_full(self.model, prompt, None).answer(self.model, forced, self.limit, ends)
        compressed = self._at(prompt, cell)
        known: Sequence[int] = ()
        if compressed.read == prompt.ids.shape[1]:
            known = (forced or self.forced(prompt).forced or ())[:1]
        return compressed.answer(self.model, known, self.limit, ends)

    def _full_logits(self, prompt: EncodedPrompt, forced: Tensor) -> Tensor:
        """Logits `[S, V]` of the full cache, in host memory and the model's precision."""
        if prompt.digest not in self._logits:
            full = read_full(self.model, prompt, None)
            self._logits[prompt.digest] = full.logits(self.model, forced).cpu()
        return self._logits[prompt.digest]

    def _at(self, prompt: EncodedPrompt, cell: MethodAtBudget) -> CompressedPrompt:
        """A prompt in one compressed cache; readings stay open as far as memory allows."""
        method, budget = cell
        if method != self._method:
            self._method, self._readings = method, {}
        reading = self._readings.get(prompt.digest)
        if reading is None:
            reading = PromptReading(self.model, self.tokenizer, prompt, parse(method))
            self._readings[prompt.digest] = reading
        found = reading.at(budget)
        if sum(each.nbytes for each in self._readings.values()) > memory(self.model.device):
            reading.release()
        return found

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.model.device)

    def _record(
        self, prompt: EncodedPrompt | Attack, cell: MethodAtBudget, **found: object
    ) -> CheckRecord:
        values = {"run": self.store.run, "prompt": prompt.digest}
        return CheckRecord.model_validate(values | {"method": cell[0], "budget": cell[1]} | found)


def kept_of_spans(compressed: CompressedPrompt) -> dict[str, float]:
    """Share of the entries of each span, over layers and KV heads, that the cache stores."""
    cache, tokens = compressed.cache, compressed.read
    spans = {n: s for n, s in compressed.prompt.spans.items() if s[1] <= tokens}
    if not spans:
        return {}
    positions = [cache.positions(layer) for layer in range(len(cache.states))]
    counts, heads = heads_per_token(positions, tokens), sum(len(layer[0]) for layer in positions)
    return {
        name: int(counts[:, start:stop].sum()) / (heads * (stop - start))
        for name, (start, stop) in spans.items()
    }


def memory(device: torch.device) -> int:
    """Bytes that open readings may take: a part of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // SHARE
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE


def _stored(found: Distances) -> PromptDistances:
    return PromptDistances(
        kl=tuple(found.kl.tolist()),
        agrees=tuple(found.agrees.tolist()),
        lost=tuple(found.lost.tolist()),
    )
