# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: which tokens of a request come from a context, and which requests fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.compatibility import Fitting
from kvfold.serve.vllm.config_checks import context_of
from kvfold.serve.vllm.placeholders import Card, Shelf

logger = logging.getLogger("vllm.kvfold")


@dataclass(frozen=True)
class Load:
    """Entries of a context, from number `start` on, that go into `slots` of the pages `blocks`.

    `by_layer` are the slots of layers that hold fewer, for their last entries.
    """

    context: str
    salt: str
    start: int
    slots: list[int]
    blocks: list[int]
    by_layer: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Step:
    """What workers do in one step: loads, and requests that fail, each with its pages."""

    loads: list[Load] = field(default_factory=list)
    refused: dict[str, list[int]] = field(default_factory=dict)


class Admission:
    """Follows requests from their arrival to the step in which their context is loaded.

    A request that is refused claims all its tokens as if they came from elsewhere, later: nothing
    is computed for it, nothing of it is ever found in the prefix cache, and workers report that it
    failed. Raising here would end the engine and all its requests.
    """

    def __init__(self, shelf: Shelf, fitting: Fitting, block: int) -> None:
        self.shelf, self.fitting, self.block = shelf, fitting, block
        self._local: dict[str, tuple[Card, int]] = {}
        self._refused: dict[str, int] = {}
        self._step = Step()

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """How many tokens after the first `local` come from a context; whether they come later."""
        try:
            card = context_of(request, self.shelf, self.fitting.check)
        except KvfoldError as problem:
            logger.error("request %s is refused: %s", request.request_id, problem)
            self._refused[request.request_id] = local
            # A request that does not want cached pages is not handed pages from elsewhere either.
            request.skip_reading_prefix_cache = False
            return request.num_tokens - local, True
        if card is None:
            return 0, False
        self._local[request.request_id] = card, local
        return max(card.kept - local, 0), False

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Notes the pages of a request, by group, `count` of whose tokens come from elsewhere."""
        name = request.request_id
        if name in self._refused:
            # Pages that were found in the prefix cache are others' too.
            own = blocks[0][self._refused.pop(name) // self.block :]
            self._step.refused[name] = list(own)
            return
        known = self._local.pop(name, None)
        if known is not None and count:
            self._step.loads.append(self.load(*known, count, blocks))

    def load(self, card: Card, start: int, count: int, blocks: Sequence[Sequence[int]]) -> Load:
        """How `count` entries from number `start` on get into the pages of the only group."""
        own = blocks[0]
        slots = [
            own[i // self.block] * self.block + i % self.block for i in range(start, start + count)
        ]
        touched = list(own[start // self.block : (start + count - 1) // self.block + 1])
        return Load(card.id, card.salt, start, slots, touched)

    def take(self) -> Step:
        """What is to be done in this step."""
        step, self._step = self._step, Step()
        return step

    def forget(self, request: Any) -> None:
        """A request has ended."""
        self._local.pop(request.request_id, None)
        self._refused.pop(request.request_id, None)
