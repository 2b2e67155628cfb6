# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read once for all methods and budgets that observe the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.copy_to_budget import observing_alike
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.prompt_batch import PromptBatch
from kvfold.hf.models import caches_latents
from kvfold.measure.cost import Cost, measured
from kvfold.methods.base import Method
from kvfold.methods.stages.when import Once

# Reads a batch into a cache; returns the batch as `generate` is to go on with it.
Read = Callable[[CompressedCache], PromptBatch]


@dataclass(frozen=True)
class Compressed:
    """A cell's cache after compression, or the exception instead.

    `batch` is what `Read` returned; `cost` is that of the reading and the compression of all rows.
    """

    cell: EvalCell
    cache: CompressedCache | Exception
    batch: PromptBatch
    cost: Cost = field(default_factory=Cost)


def reads_for_others(model: PreTrainedModel, method: Method) -> bool:
    """True if a reading by `method` is compressed after its last forward.

    Not so for token pruning between layers and for latents (MLA), which are compressed inside the
    forward, and for methods that compress at the first generated token.
    """
    stages = method.stages()
    later = isinstance(stages.when, Once)
    return not (stages.token_pruning or later or caches_latents(model))


@torch.no_grad()
def compressed(
    model: PreTrainedModel, batch: PromptBatch, cells: Sequence[EvalCell], read: Read
) -> Iterator[Compressed]:
    """Every cell's cache, in any order; each is to be used before the next is taken.

    One reading serves all methods that observe the same in a prefill, at all budgets: its copies
    are compressed. This is exact, as neither method nor budget changes a prefill's forwards. All
    methods must pass `reads_for_others`.
    """
    made: dict[EvalCell, CompressedCache] = {}
    for cell in cells:
        # Methods and budgets are checked before anything is read.
        try:
            made[cell] = new_cache(model, batch, cell)
        except Exception as problem:
            yield Compressed(cell, problem, batch)
    # Caches are let go with their group.
    for group in observing_alike(made, lambda cell: made[cell].method):
        yield from _from_one_reading(model, batch, {cell: made.pop(cell) for cell in group}, read)


def new_cache(model: PreTrainedModel, batch: PromptBatch, cell: EvalCell) -> CompressedCache:
    """An empty cache of a cell, for prompts of the batch."""
    first = batch.prompts[0]
    seed, budget = cell.seed + first.sample.index, cell.budget_of(len(batch.prompts))
    return CompressedCache(model, cell.method, budget, tokenizer=first.tokenizer, seed=seed)


def _from_one_reading(
    model: PreTrainedModel, batch: PromptBatch, group: dict[EvalCell, CompressedCache], read: Read
) -> Iterator[Compressed]:
    """The caches of a group: copies of the first one's reading, then that one itself."""
    own, *others = group
    cache, device = group[own], model.device
    with ExitStack() as prefill:
        prefill.enter_context(cache.reading())
        with measured(device) as reading:
            further = read(cache)
        for cell in others:
            taken: CompressedCache | Exception
            with measured(device) as compressing:
                try:
                    taken = cache.to_budget(cell.budget_of(len(batch.prompts)), cell.method)
                except Exception as problem:
                    taken = problem.with_traceback(None)
            yield Compressed(cell, taken, further, reading + compressing)
        with measured(device) as compressing:
            prefill.close()
    yield Compressed(own, cache, further, reading + compressing)
