# SPDX-License-Identifier: Apache-2.0
"""A compressed document with its model: what chats, edits and files of a context read."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.cache.stats import Stats
from kvfold.contexts.files.header import LevelHeader
from kvfold.errors import KvfoldError
from kvfold.hf.chat_template import PromptFrame


@dataclass(frozen=True, repr=False)
class CompressedDocument:
    """A compressed document.

    `frame` holds the chat template parts around a question, `ids [1, N]` the tokens that were read,
    those of the template before the document included. `level` tells what `levelled` has changed.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: CompressedCache
    frame: PromptFrame
    ids: Tensor
    level: LevelHeader | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with a cache of its own, of the same model."""
        return replace(self, cache=copy.deepcopy(self.cache, memo))

    def check(self) -> None:
        """Raises KvfoldError if the cache has read tokens other than the document's."""
        seen, known = self.cache.get_seq_length(), self.ids.shape[1]
        if seen != known:
            raise KvfoldError(
                f"the cache of this context has read {seen} tokens, and the context has {known}: "
                "leave its cache alone, and use ctx.chat() for later turns"
            )

    def stats(self) -> Stats:
        """Kept entries and bytes of the compressed document."""
        return self.cache.stats()
