# SPDX-License-Identifier: Apache-2.0
"""The phase a cache is in: prefill, decode, frozen, reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.history import History
from kvfold.errors import KvfoldError
from kvfold.methods.observation import Observation
from kvfold.observers.base import Log, Need, Needs

Logs = dict[type[Need[Any]], Log]
Step = Literal["prefill", "prefill end", "decode"]


@dataclass(frozen=True)
class ReconstructionForward:
    """A forward that repeats part of a context of `text` columns, or asks about it (KVzip).

    Rows read `tokens` each, padding on the left, and in all such forwards of the context together
    about `totals`.

    `scored [B, N]` are the columns, new ones included, among which its attention is shared out;
    None: it scores nothing, and its queries are on-policy references.
    `row_weights [B, S]` of its tokens, by compressed layer, multiply that attention, and so do the
    norms of projected values; there are none but in KVzip+. `rms` scores by the root of the mean
    square of attention, else by its maximum.
    """

    text: int
    tokens: list[int]
    totals: list[int]
    scored: Tensor | None
    rms: bool = False
    row_weights: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Phase:
    """Flags and token ids shared by all layers of a cache.

    A prefill is any forward of more than one token, or several forwards inside
    `cache.reading()`; a method's eviction comes at its end.
    """

    reads_ids: bool = False  # a stage reads the ids of tokens
    reading: bool = False  # inside `with cache.reading():`
    until: int = 0  # tokens at which a prefill that is read in pieces ends
    frozen: bool = False  # nothing is evicted, and tokens can be cropped
    layerwise: bool = False  # layers run one by one, on fewer and fewer tokens (PyramidInfer)
    repeating: ReconstructionForward | None = None
    observed: Observation | None = None  # what the last layer of a layer-wise prefill saw
    prefix: Tensor | None = None  # [B], first tokens of each row that are kept beside the budget
    before_refit: Callable[[int], None] | None = None  # gives a layer its on-policy references
    own_size: int | None = None  # entries per KV head to keep of a fork's own tokens; None: all
    history: History = field(default_factory=History)  # ids of all that was read
    ended: Tensor | None = None  # [B, N], true at padding that rows read after their end
    incoming: Tensor | None = None  # ids [B, S] of the forward that runs, if a stage reads them
    logs: Logs = field(default_factory=dict)  # what layers share of their observations

    @classmethod
    def of(cls, needs: Needs) -> Phase:
        """The phase of a new cache, which notes the ids and logits that stages read."""
        logs = {kind: need.log() for kind, need in needs.by_kind.items()}
        phase = cls(logs={kind: log for kind, log in logs.items() if log is not None})
        phase.read_for(needs)
        return phase

    def read_for(self, needs: Needs) -> None:
        """Notes whether stages of these `needs` read the ids of tokens."""
        self.reads_ids = any(need.reads_ids for need in needs.observed)

    @property
    def awaits_logits(self) -> bool:
        """True inside a forward whose logits an observation takes."""
        return any(log.waits for log in self.logs.values())

    def step(self, seen: int, new: int) -> Step:
        """Step of a forward of `new` tokens that reached `seen` columns."""
        if self.reading or seen < self.until:
            return "prefill"
        return "prefill end" if new > 1 or seen - new < self.until else "decode"

    def in_prefill(self, seen: int) -> bool:
        """True if more pieces of this prefill follow after `seen` columns."""
        return self.reading or seen < self.until

    def expect(self, ids: Tensor | None, start: int) -> None:
        """Notes the `ids [B, S]` of a forward that begins at column `start`.

        Called if a stage reads ids. Raises KvfoldError for embeddings (None), and as a log's begin.
        """
        if ids is None:
            raise KvfoldError(
                "this cache's method reads token ids, and inputs_embeds has none: give input_ids"
            )
        self.incoming = ids
        for log in self.logs.values():
            step = self.step(start + ids.shape[1], ids.shape[1])
            prompt = step != "decode" and not self.frozen
            log.begin(ids, start, prompt, step == "prefill")

    def note_read(
        self, ids: Tensor, start: int, logits: Tensor | None, tokens: Callable[[], Tensor | None]
    ) -> None:
        """Notes that a forward has read `ids [B, S]`, and its `logits [B, S, V]` if a stage does.

        `tokens()` gives those `[B, N]` that are no padding. Raises UnsupportedModel as a log's end.
        """
        self.history = self.history.plus(ids, start)
        for log in self.logs.values():
            log.end(ids, logits, tokens(), self.frozen)

    def forget_incoming(self) -> None:
        """Notes that no forward runs."""
        self.incoming = None
        for log in self.logs.values():
            log.forget_incoming()

    def begin_reading(self, until: int | None = None) -> None:
        """Notes that several forwards are one prefill: up to `until` columns, None: to be ended."""
        self.reading, self.until = until is None, until or 0

    def end_reading(self) -> None:
        """Notes the end of a `reading()` block, whose prompt is complete unless `until` follows."""
        self.reading = False
        for log in self.logs.values() if not self.until else ():
            log.end_reading()

    def complete_at(self, until: int) -> None:
        """Notes that a prefill in pieces is complete at `until` columns; 0: no more pieces come."""
        self.until = until

    def refit_by(self, references: Callable[[int], None] | None) -> None:
        """Takes what gives a layer its on-policy references, until layers have been refitted."""
        self.before_refit = references

    @contextmanager
    def refitting(self) -> Iterator[None]:
        """Lets go of on-policy references when layers have been refitted, or one has failed."""
        try:
            yield
        finally:
            self.before_refit = None

    def freeze(self, frozen: bool) -> None:
        """Notes whether anything is evicted from now on."""
        self.frozen = frozen

    def note_block(self, frozen: bool) -> None:
        """Notes that an outermost `frozen()` block begins or ends."""
        for log in self.logs.values():
            log.freeze(frozen)

    def repeat(self, forward: ReconstructionForward | None) -> None:
        """Notes that a forward repeats part of the context, or asks about it; None: no longer."""
        self.repeating = forward

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """Layers run one by one inside the block, on fewer and fewer tokens (PyramidInfer)."""
        self.layerwise = True
        try:
            yield
        finally:
            self.layerwise, self.observed = False, None

    def note_observed(self, observation: Observation) -> None:
        """Takes what the last layer of a layer-wise prefill saw."""
        self.observed = observation

    def keep_first(self, prefix: Tensor) -> None:
        """Keeps the first tokens of each row `[B]` beside the budget."""
        self.prefix = prefix

    def keep_own(self, size: int) -> None:
        """Has a fork keep `size` entries per KV head of its own tokens."""
        self.own_size = size

    def note_ended(self, ended: Tensor | None) -> None:
        """Takes the padding that rows read after their end, true in `[B, N]`."""
        self.ended = ended

    def note_ids(self, ids: Tensor) -> None:
        """Takes the ids `[B, N]` of all that was read."""
        self.history = History(ids)

    def compact(self) -> None:
        """Puts the ids of all that was read in one tensor of their own."""
        self.history = self.history.compact()

    def ids(self, seen: int, device: torch.device) -> Tensor | None:
        """Token ids `[B, seen]` of all columns, int64, −1 where unknown; None if all are."""
        history = self.history
        if self.incoming is not None:
            history = history.plus(self.incoming, seen - self.incoming.shape[1])
        ids = history.whole()
        if ids is None:
            return None
        return F.pad(ids.long(), (0, seen - ids.shape[1]), value=-1).to(device)

    def crop(self, length: int) -> None:
        """Forgets the ids of columns from `length` on."""
        self.history = self.history.crop(length)
        self.forget_incoming()
        for log in self.logs.values():
            log.crop(length)

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        self.history = self.history.index(rows)
        if self.prefix is not None:
            self.prefix = rows(self.prefix)
        for log in self.logs.values():
            log.index(rows)

    def reset(self) -> None:
        """As before the first token."""
        self.reading = self.frozen = self.layerwise = False
        self.until = 0
        self.repeating = self.observed = self.prefix = None
        self.before_refit = self.ended = None
        self.forget_incoming()
        self.history = History()
        for log in self.logs.values():
            log.reset()
