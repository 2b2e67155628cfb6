# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of evictions: when, and into which of vLLM's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.asked import EVICT, AskedEviction, Shape
from kvfold.serve.vllm.export import Paged


@dataclass(frozen=True)
class EvictionOrder:
    """An eviction for the workers, of a request that has read `tokens`, into blocks `targets`.

    `blocks` are vLLM's of the request, from number `first` on. `ids` are those of the tokens, where
    the method reads them. `admission` tells a request from itself before it was preempted.
    """

    eviction: AskedEviction
    admission: int
    tokens: int
    first: int
    blocks: list[int]
    targets: list[int]
    ids: list[int] | None


@dataclass(frozen=True)
class EvictionDone:
    """An order that the workers have carried out: blocks replaced so far, and targets in use."""

    admission: int
    replaced: int
    used: int


@dataclass
class EvictionCounts:
    """What has happened since these were taken last."""

    evictions: int = 0
    blocks_evicted: int = 0  # that requests gave back, less those that they took
    read_anew: int = 0  # requests, after they were preempted


@dataclass
class Evicting:
    """A request of which something is evicted; its targets are blocks of vLLM's pool."""

    admission: int
    request: Any
    eviction: AskedEviction
    targets: list[Any]
    due: int | None  # tokens after which the next eviction comes; None: there is none
    replaced: int = 0  # leading blocks of the request that are not read any more
    exact: int | None = None  # tokens that were read before the first eviction; None: all so far
    rounds: int = 0

    @property
    def blocks_evicted(self) -> int:
        """Blocks that it has given back, less those that it took for what stays."""
        return self.replaced - len(self.targets) if self.rounds else 0


class EvictionSchedule:
    """Requests from their arrival until the blocks of what was evicted are vLLM's again.

    Targets are taken when a request is admitted, so that it never runs uncompressed for want of
    them. `default` is for requests that ask nothing; None: nothing is evicted from these.
    """

    def __init__(self, default: AskedEviction | None, shape: Shape) -> None:
        self.default, self.shape = default, shape
        self.manager: Any = None  # vLLM's, bound once the scheduler has made it
        self._asked: dict[str, tuple[Any, AskedEviction]] = {}  # requests, and what they ask
        self._wrong: dict[str, KvfoldError] = {}
        self._evicting: dict[str, Evicting] = {}
        self._anew: dict[str, int] = {}  # times that a request was read anew
        self._admissions = count()
        self._counts = EvictionCounts()
        self._fresh: set[str] = set()  # admitted since the last step

    def arrived(self, request: Any, *, plain: bool) -> None:
        """Notes what a new request asks; one that is not `plain`, as it has a context, nothing."""
        name = request.request_id
        given = (request.kv_transfer_params or {}).get(EVICT)
        try:
            if given is not None and not plain:
                raise KvfoldError(f"a context was compressed already: leave {EVICT!r} out")
            found = self.default
            if given is not None:
                found = AskedEviction.of_request(given, Paged(self.shape.block, self.shape.ranks))
        except KvfoldError as problem:
            self._wrong[name] = problem
            return
        if found is not None and plain and request.sampling_params is not None:
            self._asked[name] = request, found
            self._shorten_hits(request, found)

    def check(self, request: Any) -> None:
        """Raises KvfoldError for what a request asks wrongly, or blocks that vLLM does not have."""
        name = request.request_id
        if name in self._wrong:
            raise self._wrong[name]
        if name in self._asked:
            needed, there = sum(self._needed(request)), self._pool.num_gpu_blocks - 1
            if needed > there:
                raise KvfoldError(
                    f"its prompt and what is kept of it take {needed} blocks, and vLLM has {there}"
                )

    def waits(self, request: Any) -> bool:
        """True if a request has to wait for blocks: its prompt's and its targets."""
        if request.request_id not in self._asked:
            return False
        return sum(self._needed(request)) > int(self._pool.get_num_free_blocks())

    def admitted(self, request: Any) -> None:
        """Takes the targets of a request that vLLM has given blocks."""
        name = request.request_id
        if name not in self._asked:
            return
        eviction = self._asked[name][1]
        self._release(name)
        self._fresh.add(name)
        blocks = eviction.blocks(request.num_tokens, self.shape)
        if blocks:
            targets = self._pool.get_new_blocks(blocks)
            self._evicting[name] = Evicting(
                next(self._admissions), request, eviction, targets, request.num_tokens
            )

    def preempted(self, names: set[str]) -> list[str]:
        """Gives targets back; the names of requests that are read anew, from their first token."""
        found = []
        for name in names & self._asked.keys():
            request, eviction = self._asked[name]
            if request.num_output_tokens:
                self._anew[name] = self._anew.get(name, 0) + 1
                self._counts.read_anew += 1
            found.append(name)
            if name not in self._fresh:  # else vLLM has admitted it again already
                of = self._evicting.get(name)
                self._shorten_hits(request, eviction, None if of is None else of.exact)
                self._release(name)
        self._fresh.clear()
        return found

    @property
    def requests(self) -> dict[str, Any]:
        """Admitted requests of which something is evicted, now or later."""
        return {name: of.request for name, of in self._evicting.items()}

    def orders(self, scheduled: Mapping[str, int]) -> dict[str, EvictionOrder]:
        """Evictions of this step: from requests whose prompt has been read."""
        found = {}
        for name in self._evicting.keys() & scheduled.keys():
            of = self._evicting[name]
            if of.due is None:
                continue
            computed = of.request.num_computed_tokens
            if computed >= of.due:
                found[name] = self._order(name, of, of.due)
                of.exact = of.due if of.exact is None else of.exact
                every = of.eviction.every
                of.due = None if every is None else of.due + every
            elif of.exact is None and computed + scheduled[name] >= of.due:
                # Later blocks are read after the eviction. vLLM hashes the next one before that.
                _keep_apart(of.request, of.due // self.shape.block - 1)
        return found

    def _order(self, name: str, of: Evicting, tokens: int) -> EvictionOrder:
        wanted = of.eviction.policy.needs.token_ids
        ids = list(of.request.all_token_ids[:tokens]) if wanted else None
        blocks = self._table(name)[of.replaced : -(-tokens // self.shape.block)]
        source, targets = ([block.block_id for block in part] for part in (blocks, of.targets))
        return EvictionOrder(of.eviction, of.admission, tokens, of.replaced, source, targets, ids)

    def watched(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Last tokens whose queries are kept, of requests that read some of them in this step."""
        found = {}
        for name in self._evicting.keys() & scheduled.keys():
            of = self._evicting[name]
            if of.due is not None:
                count = of.eviction.queries(of.due)
                if of.request.num_computed_tokens + scheduled[name] > of.due - count:
                    found[name] = of.eviction.window(of.due)
        return found

    def copied(self, done: Mapping[str, EvictionDone]) -> None:
        """Frees the blocks that are not read any more, of requests that still hold them.

        Targets that are not in use are freed, too, where no round follows.
        """
        for name, each in done.items():
            of = self._evicting.get(name)
            if of is None or of.admission != each.admission:
                continue
            table, null = self._table(name), self._pool.null_block
            source = table[of.replaced : each.replaced]
            table[of.replaced : each.replaced] = [null] * len(source)
            before = of.blocks_evicted
            of.replaced, of.rounds = each.replaced, of.rounds + 1
            self._pool.free_blocks(reversed(source))
            if of.eviction.every is None:
                of.targets, beyond = of.targets[: each.used], of.targets[each.used :]
                self._pool.free_blocks(beyond)
            self._counts.evictions += 1
            self._counts.blocks_evicted += of.blocks_evicted - before

    def take_counts(self) -> EvictionCounts:
        """What has happened since the last call."""
        taken, self._counts = self._counts, EvictionCounts()
        return taken

    def ended(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request that has ended; what its answer says of evictions, None: nothing."""
        name = request.request_id
        asked, anew = self._asked.pop(name, (None, None))[1], self._anew.pop(name, 0)
        self._wrong.pop(name, None)
        of = self._evicting.get(name)
        self._release(name)
        if asked is None:
            return None
        about: dict[str, Any] = {"method": asked.method, "evictions": 0, "read_anew": anew}
        if of is not None and of.rounds:
            about |= {"evictions": of.rounds, "blocks_evicted": of.blocks_evicted}
        return about

    def _release(self, name: str) -> None:
        of = self._evicting.pop(name, None)
        if of is not None:
            self._pool.free_blocks(of.targets)

    def _needed(self, request: Any) -> tuple[int, int]:
        """Blocks of a request's prompt, and of what is kept of it."""
        tokens = request.num_tokens
        targets = self._asked[request.request_id][1].blocks(tokens, self.shape)
        return tokens // self.shape.block + 1, targets

    def _shorten_hits(
        self, request: Any, eviction: AskedEviction, exact: int | None = None
    ) -> None:
        """Lets the prefix cache find none of the tokens whose queries are read.

        Nor any behind the first `exact`, which were read after an eviction.
        """
        first = (request.num_tokens - eviction.queries(request.num_tokens)) // self.shape.block
        if exact is not None:
            first = min(first, exact // self.shape.block)
        for block in range(first, len(request.block_hashes)):
            _keep_apart(request, block)

    @property
    def _pool(self) -> Any:
        return self.manager.block_pool

    def _table(self, name: str) -> list[Any]:
        return table_of(self.manager, name)


def table_of(manager: Any, name: str) -> list[Any]:
    """The list of a request's blocks in vLLM's `manager`, its own."""
    table: list[Any] = manager.coordinator.single_type_managers[0].req_to_blocks[name]
    return table


def _keep_apart(request: Any, block: int) -> None:
    """Gives a block a hash that no other request has; those of later blocks follow from it."""
    if block >= 0:
        request.block_hashes[block] = uuid4().bytes * 2
