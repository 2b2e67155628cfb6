# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read once for all methods and budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.copy_to_budget import copied_for, observing_alike, reading_together
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.prompt_batch import PromptBatch
from kvfold.generation.readers.reconstruct import reconstruct
from kvfold.hf.models import caches_latents
from kvfold.measure.cost import Cost, measured
from kvfold.methods.base import Method, Needs, parse
from kvfold.methods.observing import Observing
from kvfold.methods.stages.when import Once
from kvfold.observers.reconstruction import ContextReconstruction


@dataclass(frozen=True)
class Compressed:
    """A cell's cache after compression, or the exception instead.

    `batch` is what the reading returned; `cost` is its cost and that of compressing, of all rows.
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


@dataclass(frozen=True)
class Reading:
    """How a batch is read into a cache.

    `text` reads what a method repeats (KVzip); `rest` all that is unread then, and returns the
    batch as `generate` is to go on with it.
    """

    text: Callable[[CompressedCache], None]
    rest: Callable[[CompressedCache], PromptBatch]


@torch.no_grad()
def compressed(
    model: PreTrainedModel, batch: PromptBatch, cells: Sequence[EvalCell], reading: Reading
) -> Iterator[Compressed]:
    """Every cell's cache, in any order; each is to be used before the next is taken.

    One reading serves all methods whose observations can be made together, at all budgets: its
    copies are compressed. Neither methods nor budgets change a prefill's forwards; where attention
    is summed up for some of them, its products are added up in another order. All methods must
    pass `reads_for_others`.
    """
    made: dict[EvalCell, CompressedCache] = {}
    for cell in cells:
        # Methods and budgets are checked before anything is read.
        try:
            made[cell] = new_cache(model, batch, cell)
        except Exception as problem:
            yield Compressed(cell, problem.with_traceback(None), batch)
    for needs, group in reading_together(made, lambda cell: made[cell].method):
        caches = {cell: made.pop(cell) for cell in group}  # let go of with their group
        if len(group) > 1:
            methods = {cell: cache.method for cell, cache in caches.items()}
            yield from _together(model, batch, needs, methods, reading)
        else:
            yield _alone(model, group[0], caches[group[0]], reading)


def new_cache(model: PreTrainedModel, batch: PromptBatch, cell: EvalCell) -> CompressedCache:
    """An empty cache of a cell, for prompts of the batch."""
    tokenizer, budget = batch.prompts[0].tokenizer, cell.budget_of(len(batch.prompts))
    return CompressedCache(
        model, cell.method, budget, tokenizer=tokenizer, seed=_seed_of(cell, batch)
    )


def _seed_of(cell: EvalCell, batch: PromptBatch) -> int:
    """Seed of a cell's random methods for one batch; the cells of one task have the same."""
    return cell.seed + batch.prompts[0].sample.index


def _alone(
    model: PreTrainedModel, cell: EvalCell, cache: CompressedCache, reading: Reading
) -> Compressed:
    """A cell's cache, which reads for itself and is not copied."""
    with measured(model.device) as cost, cache.reading():
        if cache.reconstruction is not None:
            reading.text(cache)
        batch = reading.rest(cache)
    return Compressed(cell, cache, batch, cost)


def _together(
    model: PreTrainedModel,
    batch: PromptBatch,
    needs: Needs,
    methods: dict[EvalCell, Method],
    reading: Reading,
) -> Iterator[Compressed]:
    """The caches of a group: copies of one that observes all `needs`.

    Copies that repeat the text leave before the reading's last step.
    """
    tokenizer, seed = batch.prompts[0].tokenizer, _seed_of(next(iter(methods)), batch)
    reader = CompressedCache(model, Observing(needs), tokenizer=tokenizer, seed=seed)
    # Left open: this cache is only copied, and dropped with its prefill unfinished.
    reader.phase.begin_reading()
    repeating = [cell for cell in methods if ContextReconstruction in methods[cell].stages().needs]
    cost = Cost(0.0, 0)
    if repeating:
        with measured(model.device) as cost:
            reading.text(reader)
    for group in observing_alike(repeating, methods.__getitem__):
        yield from _repeated(model, batch, reader, group, cost)
    with measured(model.device) as rest:
        further = reading.rest(reader)
    for cell in (cell for cell in methods if cell not in repeating):
        yield _taken(reader, cell, further, cost + rest)


def _repeated(
    model: PreTrainedModel,
    batch: PromptBatch,
    reader: CompressedCache,
    group: Sequence[EvalCell],
    text: Cost,
) -> Iterator[Compressed]:
    """The caches of cells whose methods repeat the text alike: copies of one that has."""
    first, length = group[0], reader.get_seq_length()
    mask = None if batch.padding is None else batch.padding[:, :length]
    with measured(model.device) as repetition:
        cache = copied_for(reader, first.budget_of(len(batch.prompts)), parse(first.method))
        reconstruct(model, cache, batch.ids[:, :length], mask)
    for cell in group:
        yield _taken(cache, cell, batch, text + repetition)


def _taken(cache: CompressedCache, cell: EvalCell, batch: PromptBatch, reading: Cost) -> Compressed:
    """A cell's cache out of an open one, whose reading had a cost."""
    taken: CompressedCache | Exception
    with measured(batch.ids.device) as compressing:
        try:
            taken = cache.to_budget(cell.budget_of(len(batch.prompts)), parse(cell.method))
        except Exception as problem:
            taken = problem.with_traceback(None)
    return Compressed(cell, taken, batch, reading + compressing)
