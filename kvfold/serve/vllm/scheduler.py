# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector: tokens that come from a context, and requests that fail.

Settings and requests that would otherwise give silently wrong answers are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.asked import EVICT
from kvfold.serve.vllm.evictions.schedule import EvictionOrder, EvictionSchedule
from kvfold.serve.vllm.head_pages.layout import HeadPages
from kvfold.serve.vllm.placeholders import PREFIX, CompatibilityCheck, ServedContext, ServedFolder
from kvfold.serve.vllm.request import CONTEXT

logger = logging.getLogger("vllm.kvfold")


@dataclass(frozen=True)
class ContextLoad:
    """Loading of a context, from position `start` of `count` on, into vLLM's cache.

    `blocks` are those of all its positions. `salt` is of the file's version that was scheduled.
    `pages` are those of single heads, all ranks'; None: all heads have the same positions.
    """

    context: str
    salt: str
    start: int
    count: int
    blocks: list[int]
    pages: HeadPages | None = None


@dataclass(frozen=True)
class OwnPages:
    """Pages of single heads of a request, all ranks', in `blocks`; `replaced` as in `Layout`."""

    pages: HeadPages
    blocks: list[int]
    replaced: int


@dataclass
class EngineStep:
    """Work of one engine step.

    Args:
        loads: contexts to load.
        refused: failed requests, with their blocks.
        laid: requests that have got pages of single heads since the last step, and where.
        evictions: requests that get such pages now, of what stays of their prompt.
        watched: requests that read a prompt, and of how many last tokens queries are kept.
        gone: requests that have ended, or are read anew.
        writing: the block that each of these requests writes into.
    """

    loads: list[ContextLoad] = field(default_factory=list)
    refused: dict[str, list[int]] = field(default_factory=dict)
    laid: dict[str, OwnPages] = field(default_factory=dict)
    evictions: dict[str, EvictionOrder] = field(default_factory=dict)
    watched: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    writing: dict[int, str] = field(default_factory=dict)


class SchedulerSide:
    """Requests from their arrival to the step that loads their context; pages of `block` tokens.

    A refused request claims that all its tokens are loaded asynchronously: vLLM computes nothing
    for it and caches none of its pages, and the workers then report the load as failed. An
    exception here would end the engine with all its requests.
    """

    def __init__(
        self,
        served_folder: ServedFolder | None,
        compatibility: CompatibilityCheck | None,
        evicting: EvictionSchedule | None,
        block: int,
    ) -> None:
        self.served_folder, self.compatibility = served_folder, compatibility
        self.evicting, self.block = evicting, block
        self._local: dict[str, ServedContext] = {}
        self._running: dict[str, Any] = {}  # requests with pages of single heads
        self._refused: dict[str, int] = {}
        self._step = EngineStep()

    def arrived(self, request: Any) -> None:
        """Notes a new request, before vLLM looks for it in the prefix cache."""
        if self.evicting is not None:
            named = CONTEXT in (request.kv_transfer_params or {})
            self.evicting.arrived(request, plain=not named)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond the first `local` that come from a context; True if asynchronously.

        None: the request waits for blocks.
        """
        try:
            served = self._context_of(request)
            self._check_eviction(request)
        except KvfoldError as problem:
            logger.error("request %s is refused: %s", request.request_id, problem)
            self._refused[request.request_id] = local
            # vLLM would not ask the connector for a request that skips the prefix cache.
            request.skip_reading_prefix_cache = False
            return request.num_tokens - local, True
        if served is None:
            waits = self.evicting is not None and self.evicting.waits(request)
            return None if waits else 0, False
        self._local[request.request_id] = served
        # Not asynchronously: only for such loads does vLLM call `start_load_kv` before the forward.
        return max(served.kept - local, 0), False

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Notes a request's pages, one list per cache group; `count` of its tokens are loaded."""
        name = request.request_id
        if name in self._refused:
            # Pages from the prefix cache are shared with other requests: they do not fail.
            own = blocks[0][self._refused.pop(name) // self.block :]
            self._step.refused[name] = list(own)
            return
        served = self._local.pop(name, None)
        if served is None:
            if self.evicting is not None:
                self.evicting.admitted(request)
            return
        own = list(blocks[0][: -(-served.kept // self.block)])
        if count:
            start = served.kept - count
            self._step.loads.append(
                ContextLoad(served.id, served.salt, start, served.kept, own, served.pages)
            )
        if served.pages is not None:
            self._running[name] = request
            whole = served.kept // self.block
            self._step.laid[name] = OwnPages(served.pages, own[:whole], whole)

    def take(
        self,
        scheduled: Mapping[str, int],
        preempted: set[str],
        block_of: Callable[[str, int], int],
    ) -> EngineStep:
        """The work of this step; the next one starts empty.

        `scheduled` are the tokens of each request in this step, `preempted` those that have lost
        their blocks; `block_of` gives a request's block, by its number.
        """
        step, self._step = self._step, EngineStep()
        running = self._running
        if self.evicting is not None:
            step.gone += self.evicting.preempted(preempted)
            step.evictions = self.evicting.orders(scheduled)
            step.watched = self.evicting.watched(scheduled)
            running = running | self.evicting.requests
        for name in running.keys() & scheduled.keys():
            last = running[name].num_computed_tokens + scheduled[name] - 1
            step.writing[block_of(name, last // self.block)] = name
        return step

    def forget(self, request: Any) -> dict[str, Any] | None:
        """Forgets a request that has ended; what its answer says of evictions."""
        name = request.request_id
        self._local.pop(name, None)
        self._refused.pop(name, None)
        about = None if self.evicting is None else self.evicting.ended(request)
        if self._running.pop(name, None) is not None or about is not None:
            self._step.gone.append(name)
        return None if about is None else {EVICT: about}

    def _context_of(self, request: Any) -> ServedContext | None:
        if self.served_folder is None or self.compatibility is None:
            if CONTEXT in (request.kv_transfer_params or {}):
                raise KvfoldError("this server has no folder of contexts")
            return None
        return context_of(request, self.served_folder, self.compatibility.check)

    def _check_eviction(self, request: Any) -> None:
        if self.evicting is not None:
            self.evicting.check(request)
        elif EVICT in (request.kv_transfer_params or {}):
            raise KvfoldError("this vLLM evicts nothing: it has no pages of single heads")


def check_engine(config: Any, groups: int) -> None:
    """Raises KvfoldError for settings of vLLM under which pages would be filled wrongly.

    `config` is its `VllmConfig`, `groups` the number of its cache groups.
    """
    parallel = config.parallel_config
    wrong = {
        "kv_load_failure_policy": config.kv_transfer_config.kv_load_failure_policy != "fail"
        and "a context that cannot be loaded would be computed from its placeholders: leave it at "
        "'fail'",
        "speculative_config": config.speculative_config is not None
        and "the draft model's pages would stay empty: leave it out",
        "quantization": config.model_config.quantization is not None
        and "kvfold cannot compare quantized weights with those of a context: leave it out",
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1
        and "it was never tested: use tensor parallelism",
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1
        and "pages are laid out otherwise: leave it at 1",
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1
        and "pages are laid out otherwise: leave it at 1",
        "the model": groups != 1
        and "its layers are of several kinds, and kvfold fills one: use kvfold's own server",
    }
    found = [f"{name}: {why}" for name, why in wrong.items() if why]
    if found:
        raise KvfoldError(f"vLLM cannot serve compressed contexts with {'; '.join(found)}")


def context_of(
    request: Any, served_folder: ServedFolder, check: Callable[[ServedContext], None]
) -> ServedContext | None:
    """The context that a request of vLLM names, or None for an ordinary request.

    Raises KvfoldError if the answer would be wrong: missing or foreign salt, wrong placeholders, no
    question, unsupported options; and what `check` raises for a context of another model.
    """
    named = (request.kv_transfer_params or {}).get(CONTEXT)
    own_salt = (request.cache_salt or "").startswith(PREFIX)
    if named is None:
        if own_salt:
            raise KvfoldError(
                f"its cache_salt is a context's, but kv_transfer_params name none: its "
                f"placeholders would be read as text; send {{{CONTEXT!r}: id}} too"
            )
        return None
    served = served_folder.get(named)
    if request.cache_salt != served.salt:
        raise KvfoldError(
            f"a request to context {served.id} needs cache_salt {served.salt!r}, not "
            f"{request.cache_salt!r}: without it, contexts would share pages"
        )
    given = request.prompt_token_ids or []
    if given[: served.kept] != served.tokens:
        raise KvfoldError(
            f"the prompt does not begin with the {served.kept} placeholders of context {served.id}"
        )
    if len(given) == served.kept:
        raise KvfoldError(f"nothing follows the {served.kept} placeholders of context {served.id}")
    _check_use(request)
    check(served)
    return served


def _check_use(request: Any) -> None:
    """Raises KvfoldError for options that need the model to read the placeholders."""
    sampling = request.sampling_params
    wrong = {
        "prompt_logprobs": sampling is not None and sampling.prompt_logprobs is not None,
        "skip_reading_prefix_cache": bool(request.skip_reading_prefix_cache),
        "pooling": sampling is None,
        "a LoRA adapter": request.lora_request is not None,
        "images or sound": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None,
    }
    found = [name for name, asked in wrong.items() if asked]
    if found:
        raise KvfoldError(f"a compressed context does not go with {' and '.join(found)}")
