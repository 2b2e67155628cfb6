# SPDX-License-Identifier: Apache-2.0
"""Settings of the server, fixed for its lifetime."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from kvfold.budget import Budget
from kvfold.cache.fork import own_stages
from kvfold.cache.plan import checked_budget
from kvfold.checks.result import CheckLimits
from kvfold.contexts.session import check_method
from kvfold.errors import KvfoldError
from kvfold.methods.base import parse
from kvfold.serve.cross_origin import ANY

# As browsers send it: a scheme, a host in lower case, a port if it is not the scheme's.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?")

LIMITS = CheckLimits()
# Settings that are at least 1
POSITIVE = (
    "memory", "session_memory", "session_budget", "contexts", "workers", "body", "values",
    "answer_tokens", "connections",
)  # fmt: skip


@dataclass(frozen=True)
class ServerSettings:
    """Defaults of new contexts, and limits. Sizes in bytes, lengths in tokens, times in seconds.

    Args:
        method: compression method of contexts whose request names none.
        budget: budget of contexts whose request names none.
        methods: further methods that a request may name; None: all.
        prefill_chunk: tokens read per forward.
        memory: bytes of all contexts in memory; beyond it, they move to `folder`.
        session_method: method of sessions whose request names none.
        session_budget: budget in tokens of sessions whose request names none.
        session_memory: bytes of all sessions in memory; beyond it, they move to `folder`.
        shrink: smaller budget to which idle contexts shrink before any moves to disk; None: none.
        folder: where context files are found and kept; None: a temporary folder, removed at exit.
        codec: of contexts' files; None: tensors as they are.
        contexts: contexts held, on disk included, and as many sessions.
        workers: requests computed at a time, each in a thread.
        queue: requests that may wait for a worker.
        body: bytes of a request body.
        values: strings, numbers, lists and objects in the JSON of a request body.
        connections: open connections.
        client_timeout: time for a client to send its headers, to send its body, and to read
            output that is ready.
        context_tokens: tokens of a document or prompt; None: the model's trained length.
        answer_tokens: generated tokens of one answer.
        api_key: bearer token that clients must send; None: none is needed.
        chat_budget: entries per KV head that earlier turns after a context keep; None: all.
        special_tokens: parse special tokens in clients' texts instead of reading them as text.
        allow_longer: accept texts beyond the model's trained length.
        capture: decode by captured steps, where those of a context's method can be captured.
        grace: time for running answers to end after a stop.
        shadow: part of the answers that are compared with a full cache's when the server is idle.
        shadow_tolerance: largest mean loss of these, in nats per token, that a certificate allows.
        origins: web sites whose pages may use the server, such as "https://a.example"; "*": all.

    Raises KvfoldError for values out of range, an origin that is none, a `shrink` that is no
    budget, a blank API key, an unknown method of sessions, and a budget of sessions or chats below
    what is always kept.
    """

    method: str = "kvzip"
    budget: float | str | None = 0.5
    methods: tuple[str, ...] | None = None
    prefill_chunk: int | None = 1024
    memory: int = 4 * 2**30
    session_method: str = "snapkv"
    session_budget: int = 1024
    session_memory: int = 2**30
    shrink: float | str | None = None
    folder: Path | None = None
    codec: str | None = None
    contexts: int = 1000
    workers: int = 1
    queue: int = 64
    body: int = 32 * 2**20
    values: int = 2**18
    connections: int = 512
    client_timeout: float = 60.0
    context_tokens: int | None = None
    answer_tokens: int = 1024
    api_key: str | None = None
    chat_budget: int | None = None
    special_tokens: bool = False
    allow_longer: bool = False
    capture: bool = False
    grace: float = 30.0
    shadow: float = 0.0
    shadow_tolerance: float = LIMITS.mean_kl
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise KvfoldError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.shrink is not None:
            Budget.of(self.shrink)
        if self.queue < 0 or self.grace < 0:
            raise KvfoldError("queue and grace cannot be negative")
        if not 0 < self.client_timeout < math.inf:
            raise KvfoldError(
                f"the client timeout is a positive, finite number of seconds, not "
                f"{self.client_timeout}: choose one such as 60"
            )
        if not 0 <= self.shadow <= 1:
            raise KvfoldError(f"the shadow is a part of the requests, not {self.shadow}: try 0.01")
        if not 0 < self.shadow_tolerance < LIMITS.clip:
            raise KvfoldError(
                f"the shadow's tolerance is between 0 and {LIMITS.clip:g} nats per token, where "
                f"losses are clipped, not {self.shadow_tolerance}: {LIMITS.mean_kl:g} is usual"
            )
        if self.api_key is not None and not self.api_key.strip():
            raise KvfoldError("the API key is empty: set one, or leave it out")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise KvfoldError("the API key begins or ends with white space: leave that out")
        for origin in self.origins:
            if origin != ANY and not ORIGIN.fullmatch(origin):
                raise KvfoldError(
                    f"{origin!r} is no origin of web pages: write scheme and host in lower case, "
                    'such as "https://example.org" or "http://localhost:3000", or "*" for all'
                )
        _check_sessions(self.session_method, self.session_budget)
        if self.chat_budget is not None:
            _check_chats(self.method, self.chat_budget)


def _check_sessions(named: str, budget: int) -> None:
    """Raises KvfoldError if a session could not begin with that method and budget."""
    try:
        method = parse(named)
        if not method.takes_budget:
            raise KvfoldError(f"{method} takes no budget, which bounds a session: choose another")
        check_method(method)
        checked_budget(method, budget, method.stages().forced.least)
    except KvfoldError as problem:
        message = f"session_method {named!r} with session_budget {budget}: {problem}"
        raise KvfoldError(message) from problem


def _check_chats(named: str, budget: int) -> None:
    """Raises KvfoldError if a context of that method could not be asked within the chat budget."""
    least = max(1, own_stages(parse(named).stages()).forced.least)
    if budget < least:
        raise KvfoldError(
            f"later turns of {named} keep at least {least} entries per KV head, and chat_budget is "
            f"{budget}: raise it, or leave it out"
        )
