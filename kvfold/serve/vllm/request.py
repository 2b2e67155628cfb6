# SPDX-License-Identifier: Apache-2.0
"""Requests to vLLM for a question over a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.vllm.placeholders import ServedContext

# Key of vLLM's `kv_transfer_params` that names a context.
CONTEXT = "kvfold_context"


@dataclass(frozen=True)
class ContextPrompt:
    """A prompt over a context: its placeholders, then the tokens of a question.

    Raises KvfoldError for an empty question.
    """

    served: ServedContext
    question: list[int]

    def __post_init__(self) -> None:
        if not self.question:
            raise KvfoldError(f"nothing is asked of context {self.served.id}")

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the whole prompt."""
        return [*self.served.tokens, *self.question]

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt for `LLM.generate`."""
        return {"prompt_token_ids": self.token_ids, "cache_salt": self.served.salt}

    @property
    def extra_args(self) -> dict[str, Any]:
        """`extra_args` for `SamplingParams`."""
        return {"kv_transfer_params": {CONTEXT: self.served.id}}

    @property
    def body(self) -> dict[str, Any]:
        """Fields of a `/v1/completions` body, except sampling parameters."""
        return {"prompt": self.token_ids, "cache_salt": self.served.salt, **self.extra_args}


def check_vocabulary(served: ServedContext, own: str) -> None:
    """Raises ContextFileError if the served tokenizer's vocabulary `own` is not the context's."""
    if served.vocabulary != own:
        raise ContextFileError(f"context {served.id} was made with another vocabulary")
