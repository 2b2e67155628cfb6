# SPDX-License-Identifier: Apache-2.0
"""Measurements of prompts: distances, free answers, leaked texts, each made once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.cache.spans import Span
from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.reading import CompressedPrompts, MethodAtBudget, PromptReading, read_full
from kvfold.checks.records import FULL, CheckRecord, CheckStore, FreeAnswer, PromptDistances
from kvfold.contexts.answer import end_tokens
from kvfold.errors import KvfoldError
from kvfold.eval.metrics.words import marks, words
from kvfold.eval.run.outcome import cache_usage
from kvfold.eval.run.read_files import digests
from kvfold.inspect.retention import heads_per_token
from kvfold.methods.base import parse

# The noise floor reads a prompt in this many pieces instead of one.
PIECES = 3
# Part of the memory that open readings may take, and logits of the full cache.
SHARE = 4
WORDS = "words of any script"  # in the protocol: other words give other numbers


class Distances(NamedTuple):
    """Per position: KL divergence in nats `[S]`, same top token `[S]`, lost log-likelihood `[S]`.

    The log-likelihood is that of the forced token, ln p − ln c: positive where the compressed cache
    finds it less likely.
    """

    kl: Tensor
    agrees: Tensor
    lost: Tensor


def distances(full: Tensor, compressed: Tensor, forced: Tensor) -> Distances:
    """Distances of logits `[S, V]` at the positions that predict the `forced` tokens `[S]`.

    KL(p ‖ c) = Σ_v p_v (ln p_v − ln c_v), from log-softmax in float32. Of equal logits the lower
    token id is the top one.
    """
    ours, theirs = full.float().log_softmax(-1), compressed.float().log_softmax(-1)
    # A token that p rules out adds nothing, also where c rules it out.
    terms = torch.where(ours == -torch.inf, 0.0, ours.exp() * (ours - theirs))
    at = forced[:, None]
    lost = (ours.gather(-1, at) - theirs.gather(-1, at))[:, 0]
    return Distances(terms.sum(-1).clamp(min=0), top(full) == top(compressed), lost)


def top(logits: Tensor) -> Tensor:
    """Lowest id `[S]` of the largest of `logits [S, V]`."""
    largest = logits == logits.amax(-1, keepdim=True)
    return largest.to(torch.uint8).argmax(-1)


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
    is being measured. The prompts of a call are read together, as one batch.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: CheckStore
    tokens: int
    limit: int
    say: Callable[[str], None] = lambda text: None
    _logits: dict[str, Tensor] = field(default_factory=dict)
    _readings: dict[tuple[str, ...], PromptReading] = field(default_factory=dict)
    _method: str = ""

    def forced(self, prompts: Sequence[EncodedPrompt]) -> list[CheckRecord]:
        """The full cache's greedy tokens, its noise floor, and the effect of each span."""
        full = (FULL, None)
        if rows := [p for p in prompts if self.store.get(p.digest, full, "forced") is None]:
            self._measure_forced(rows)
        return [self._stored(p.digest, full, "forced") for p in prompts]

    def distances(
        self, prompts: Sequence[EncodedPrompt], cell: MethodAtBudget
    ) -> list[PromptDistances]:
        """Distances of one compressed cache, the full cache's tokens forced through it."""
        if rows := [p for p in prompts if self.store.get(p.digest, cell, "distances") is None]:
            self._measure_distances(rows, cell)
        records = [self._stored(p.digest, cell, "distances") for p in prompts]
        return [each.distances for each in records if each.distances is not None]

    def answers(self, prompts: Sequence[EncodedPrompt], cell: MethodAtBudget) -> list[FreeAnswer]:
        """Lengths of the greedy answers with one cache."""
        if rows := [p for p in prompts if self.store.get(p.digest, cell, "answer") is None]:
            forced = [record.forced or () for record in self.forced(rows)]
            for prompt, tokens in zip(rows, self._generated(rows, cell, forced), strict=True):
                ended = bool(tokens) and tokens[-1] in end_tokens(self.model)
                made = FreeAnswer(tokens=len(tokens), ended=ended)
                self._add(prompt.digest, cell, answer=made)
        records = [self._stored(p.digest, cell, "answer") for p in prompts]
        return [each.answer for each in records if each.answer is not None]

    def leaked(self, attacks: Sequence[Attack], cell: MethodAtBudget) -> list[dict[str, float]]:
        """ROUGE-L recall of each protected text in the answers to attacks."""
        if rows := [a for a in attacks if self.store.get(a.digest, cell, "leaked") is None]:
            answers = self._generated([attack.prompt for attack in rows], cell)
            for attack, tokens in zip(rows, answers, strict=True):
                said = str(self.tokenizer.decode(tokens))
                found = {name: recall(text, said) for name, text in attack.protected.items()}
                self._add(attack.digest, cell, leaked=found)
        records = [self._stored(a.digest, cell, "leaked") for a in attacks]
        return [each.leaked for each in records if each.leaked is not None]

    def _measure_forced(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Answers of full caches, read whole and in pieces, and without each span."""
        self.say("full cache")
        full = read_full(self.model, prompts)
        forced = full.answers(self.model, [()] * len(prompts), self.tokens)
        whole = self._remember(full, forced)
        other = read_full(self.model, prompts, PIECES).logits(self.model, forced)
        for prompt, own, logits, pieces in zip(prompts, forced, whole, other, strict=True):
            floor, effects = distances(logits, pieces.cpu(), torch.tensor(own)), {}
            for name, span in prompt.spans.items():
                (absent,) = read_full(self.model, [prompt.without(span)]).logits(self.model, [own])
                found = distances(logits, absent.cpu(), torch.tensor(own))
                effects[name] = found.kl.mean().item()
            made = {"forced": tuple(own), "distances": _as_stored(floor), "effects": effects}
            self._add(prompt.digest, (FULL, None), **made)

    def _measure_distances(self, prompts: Sequence[EncodedPrompt], cell: MethodAtBudget) -> None:
        """Distances of rows of one compressed cache."""
        forced = [record.forced or () for record in self.forced(prompts)]
        full = self._full_logits(prompts, forced)
        compressed = self._at(prompts, cell)
        held, spans = cache_usage(compressed.cache), kept_of_spans(compressed)
        found = compressed.logits(self.model, forced)
        self._check_numbers(found, cell[0])
        for row, (prompt, ours) in enumerate(zip(prompts, full, strict=True)):
            theirs = found[row].cpu().to(ours.dtype)
            # Before any of the answer is read, nothing has been compressed yet.
            theirs = torch.cat([ours[: len(ours) - len(theirs)], theirs])
            made = _as_stored(distances(ours, theirs, torch.tensor(forced[row])))
            sizes = {"nbytes": held[row].nbytes, "nbytes_full": held[row].nbytes_full}
            own = {"kept": held[row].kept, "spans": spans[row]} | sizes
            self._add(prompt.digest, cell, distances=made.model_copy(update=own))

    def _generated(
        self,
        prompts: Sequence[EncodedPrompt],
        cell: MethodAtBudget,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """Greedy answers; the full cache's go on from its `forced` tokens, if they are given."""
        none: list[Sequence[int]] = [()] * len(prompts)
        if cell[0] == FULL:
            return read_full(self.model, prompts).answers(self.model, forced or none, self.limit)
        compressed = self._at(prompts, cell)
        if any(rest.shape[1] for rest in compressed.unread):
            return compressed.answers(self.model, none, self.limit)
        firsts = forced or [record.forced or () for record in self.forced(prompts)]
        return compressed.answers(self.model, [own[:1] for own in firsts], self.limit)

    def _full_logits(
        self, prompts: Sequence[EncodedPrompt], forced: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Logits `[S, V]` of the full cache, in host memory and the model's precision."""
        if any(prompt.digest not in self._logits for prompt in prompts):
            self._remember(read_full(self.model, prompts), forced)
        return [self._logits[prompt.digest] for prompt in prompts]

    def _remember(self, full: CompressedPrompts, forced: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits `[S, V]` of the full cache, which further methods are compared with."""
        found = [logits.cpu() for logits in full.logits(self.model, forced)]
        self._check_numbers(found, FULL)
        kept = sum(logits.nbytes for logits in self._logits.values())
        if kept + sum(logits.nbytes for logits in found) > memory(torch.device("cpu")):
            self._logits.clear()  # made anew when a method comes to them
        self._logits |= {p.digest: own for p, own in zip(full.prompts, found, strict=True)}
        return found

    def _check_numbers(self, logits: Sequence[Tensor], method: str) -> None:
        """Raises KvfoldError for logits that overflow the model's dtype."""
        if any(bool(each.float().log_softmax(-1).isnan().any()) for each in logits):
            raise KvfoldError(
                f"predictions of {type(self.model).__name__} with {method} are no numbers in "
                f"{self.model.dtype}: load the model in bfloat16 or float32"
            )

    def _at(self, prompts: Sequence[EncodedPrompt], cell: MethodAtBudget) -> CompressedPrompts:
        """Prompts in one compressed cache; readings stay open as far as memory allows."""
        name, budget = cell
        method = parse(name)
        if name != self._method:
            self._method = name
            self._readings = {r: own for r, own in self._readings.items() if own.serves(method)}
        rows = tuple(prompt.digest for prompt in prompts)
        reading = self._readings.get(rows)
        if reading is None:
            reading = PromptReading(self.model, self.tokenizer, prompts)
            self._readings[rows] = reading
        found = reading.at(method, budget)
        if sum(each.nbytes for each in self._readings.values()) > memory(self.model.device):
            reading.release()
        return found

    def _stored(self, digest: str, cell: MethodAtBudget, kind: str) -> CheckRecord:
        """A record that has been made."""
        found = self.store.get(digest, cell, kind)
        assert found is not None
        return found

    def _add(self, digest: str, cell: MethodAtBudget, **found: object) -> None:
        method, budget = cell
        key = {"prompt": digest, "method": method, "budget": budget, "files": digests(method)}
        self.store.add(CheckRecord.model_validate({"run": self.store.run} | key | found))


def kept_of_spans(compressed: CompressedPrompts) -> list[dict[str, float]]:
    """Share of each span's entries, over layers and KV heads, that the cache stores, by row."""
    cache, lengths = compressed.cache, compressed.lengths
    found = []
    for row, (prompt, tokens) in enumerate(zip(compressed.prompts, lengths, strict=True)):
        spans = {name: span for name, span in prompt.spans.items() if span[1] <= tokens}
        found.append(_kept(cache, row, tokens, spans) if spans else {})
    return found


def _kept(
    cache: CompressedCache, row: int, tokens: int, spans: Mapping[str, Span]
) -> dict[str, float]:
    """Shares of the spans of one row, of which `tokens` were read."""
    padding = cache.get_seq_length() - tokens
    stored = [cache.positions(layer)[row] for layer in range(len(cache.states))]
    positions = [[[head - padding for head in heads]] for heads in stored]
    counts, heads = heads_per_token(positions, tokens), sum(map(len, stored))
    return {
        name: int(counts[:, start:stop].sum()) / (heads * (stop - start))
        for name, (start, stop) in spans.items()
    }


def memory(device: torch.device) -> int:
    """Bytes that open readings may take: a part of the device's memory, and of what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch keeps for its next tensors is free as well.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(total // SHARE, free // 2)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE


def _as_stored(found: Distances) -> PromptDistances:
    return PromptDistances(
        kl=tuple(found.kl.tolist()),
        agrees=tuple(found.agrees.tolist()),
        lost=tuple(found.lost.tolist()),
    )


def recall(protected: str, answer: str) -> float:
    """LCS of the words of both texts over the words of `protected`; 0 for a blank text.

    A protected text without words, such as one of symbols, is compared by its characters.
    """
    split = words if words(protected) else marks
    wanted, said = split(protected), split(answer)
    return common(wanted, said) / len(wanted) if wanted else 0.0


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = lengths[:]
        for place, found in enumerate(other, 1):
            same = before[place - 1] + 1 if word == found else 0
            lengths[place] = max(same, before[place], lengths[place - 1])
    return lengths[-1]
