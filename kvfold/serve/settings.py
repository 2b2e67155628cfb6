# SPDX-License-Identifier: Apache-2.0
"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import KvfoldError


@dataclass(frozen=True)
class Settings:
    """Defaults of contexts, and limits; sizes are in bytes, lengths in tokens, times in seconds.

    `method` and `budget` are used where a request names none, `methods` are those that it may name
    beside it, None: all. `memory` bounds the contexts held in
    memory. `folder` keeps contexts beyond the server's life; None: a private one that is removed.
    `workers` answers are generated at a time, and `queue` requests may wait for them.
    `body` bounds the bytes of a request, `values` those of its JSON, each text or number one.
    At most `connections` are open, and a client has `client_timeout` to send its headers, to send
    its body, and to take what is ready for it.
    `context_tokens` bounds documents and prompts, None: by what the model was trained for,
    which `allow_longer` lets them pass.
    Earlier turns after a context keep `chat_budget` entries per KV head, None: all.
    `special_tokens`: what clients spell like a special token is meant as one.
    """

    method: str = "kvzip"
    budget: float | str | None = 0.5
    methods: tuple[str, ...] | None = None
    prefill_chunk: int | None = 1024
    memory: int = 4 * 2**30
    folder: Path | None = None
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
    grace: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "memory",
            "contexts",
            "workers",
            "body",
            "values",
            "answer_tokens",
            "connections",
        ):
            if getattr(self, name) < 1:
                raise KvfoldError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.queue < 0 or self.grace < 0:
            raise KvfoldError("queue and grace cannot be negative")
        if not self.client_timeout > 0:
            raise KvfoldError(f"the client timeout is positive, not {self.client_timeout}")
        if self.api_key is not None and not self.api_key.strip():
            raise KvfoldError("the API key is empty: set one, or leave it out")
