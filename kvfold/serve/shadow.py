# SPDX-License-Identifier: Apache-2.0
"""One answer's loss: the KL from a full cache's predictions to those that it was made with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.stats import Stats
from kvfold.checks.measure import distances
from kvfold.contexts.context import Context
from kvfold.generation.reading import read_turn
from kvfold.hf.models import read_logits, read_tokens, text_config
from kvfold.serve.context_pool import ContextPool
from kvfold.serve.stored import Stored

READ = 256  # tokens of a prompt per forward: a request waits for one at most
PREDICTED = 32  # tokens of an answer per forward: their logits are held at a time
TEMPORARY = 8  # tensors of their size while they are compared, in float32


@dataclass(frozen=True)
class Shadow:
    """An answer to compare: the context that it was made with, and the tokens after that.

    `stats` are the context's when it answered; it may shrink later. `turns` are token ids of the
    prompt, the question last, `answer` those that were generated.
    """

    held: Stored[Context]
    stats: Stats
    turns: tuple[array[int], ...]
    answer: array[int]
    given_up: int = 0

    @classmethod
    def of(
        cls, held: Stored[Context], turns: Sequence[Sequence[int]], answer: Sequence[int]
    ) -> Shadow:
        """The shadow of an answer from `held`, which is still being read."""
        return cls(held, held.stats, tuple(array("I", t) for t in turns), array("I", answer))


class ShadowSkipped(Exception):
    """This answer cannot be compared, for the `reason` that the metrics count."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class ShadowReader:
    """Reads answers again with a full cache, in the memory of the contexts.

    `fork` gives the cache that a question after some turns is answered with, `token_bytes` are
    those of a token in a full cache.
    """

    model: PreTrainedModel
    contexts: ContextPool
    fork: Callable[[Context, list[list[int]]], CompressedCache]
    token_bytes: int

    def loss(self, shadow: Shadow) -> float:
        """Mean KL per token of the answer; raises ShadowSkipped."""
        with (
            self.contexts.reading_unchanged(shadow.held, shadow.stats) as context,
            self.contexts.spare(self.nbytes(shadow)) as fits,
        ):
            if context is None:
                raise ShadowSkipped("moved")
            if not fits:
                raise ShadowSkipped("memory")
            turns = [list(turn) for turn in shadow.turns]
            prompt = [*context.ids[0].tolist(), *chain(*turns)]
            return mean_kl(self.model, self.fork(context, turns), prompt, shadow.answer)

    def nbytes(self, shadow: Shadow) -> int:
        """Bytes that the comparison takes at most: two caches, and the logits of some tokens."""
        stats, own = shadow.stats, sum(map(len, shadow.turns)) + len(shadow.answer)
        # Layers that are not compressed, such as those of sliding windows, are in both.
        others = shadow.held.size - stats.nbytes - stats.cold.host - stats.id_bytes
        predicted = min(PREDICTED, len(shadow.answer)) * text_config(self.model).vocab_size
        entries = (stats.seen + 2 * own) * self.token_bytes
        size: int = entries + 2 * others + predicted * TEMPORARY * torch.float32.itemsize
        return size


@torch.no_grad()
def mean_kl(
    model: PreTrainedModel, reader: CompressedCache, prompt: Sequence[int], answer: Sequence[int]
) -> float:
    """Mean over the answer's tokens of the KL from a full cache's predictions to the reader's.

    The answer is forced through both. `reader` holds a part of the prompt, and is used up.
    """
    full, device = CompressedCache(model, "full"), model.device
    fed = torch.tensor([[*prompt, *answer[:-1]]], device=device)
    forced = torch.tensor(list(answer), device=device)
    first = len(prompt) - 1  # its logits predict the first token
    if first:
        read_turn(model, full, fed[:, :first], chunk=READ)
    for piece in fed[:, reader.get_seq_length() : first].split(READ, 1):
        if piece.shape[1]:
            read_tokens(model, piece, reader, None)
    found = []
    pieces = fed[:, first:].split(PREDICTED, 1)
    for piece, predicted in zip(pieces, forced.split(PREDICTED), strict=True):
        ours, theirs = (
            read_logits(model, piece, cache, None, piece.shape[1])[0] for cache in (full, reader)
        )
        found.append(distances(ours, theirs, predicted).kl)
    return torch.cat(found).mean().item()
