# SPDX-License-Identifier: Apache-2.0
"""What a client sends to vLLM for a question to a context."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvfold.contexts.files.format import digest
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.vllm.placeholders import Card

# The one of vLLM's `kv_transfer_params` that names a context.
CONTEXT = "kvfold_context"


@dataclass(frozen=True)
class Asked:
    """A prompt over a context: its placeholders, then the tokens of a question."""

    card: Card
    question: list[int]

    def __post_init__(self) -> None:
        if not self.question:
            raise KvfoldError(f"nothing is asked of context {self.card.id}")

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.card.tokens, *self.question]

    @property
    def prompt(self) -> dict[str, Any]:
        """For `LLM.generate`."""
        return {"prompt_token_ids": self.token_ids, "cache_salt": self.card.salt}

    @property
    def extra_args(self) -> dict[str, Any]:
        """For `SamplingParams`."""
        return {"kv_transfer_params": {CONTEXT: self.card.id}}

    @property
    def body(self) -> dict[str, Any]:
        """For `/v1/completions`, beside how the answer is drawn."""
        return {"prompt": self.token_ids, "cache_salt": self.card.salt, **self.extra_args}


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """The checksum that `ModelPart.vocabulary` holds."""
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def check_vocabulary(card: Card, own: str) -> None:
    """Raises ContextFileError where questions would be written in other tokens."""
    if card.vocabulary != own:
        raise ContextFileError(f"context {card.id} was made with another vocabulary")
