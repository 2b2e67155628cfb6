# SPDX-License-Identifier: Apache-2.0
"""Perplexity of windows of a text: streamed token by token, or of a second half after the first.

Source: mit-han-lab/streaming-llm `examples/eval_long_ppl.py` (Xiao et al., 2023,
arXiv 2309.17453, section 4.1): one token at a time, eviction after each; perplexity is the
exponential of the mean negative log-likelihood. One forward over a window would evict nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import NoData, Question, SampleRequest, Task, TaskSample

# Upper bound of a token's mean length in natural text.
CHARACTERS_PER_TOKEN = 12


def window(text: str, start: int, length: int, count: Callable[[str], int]) -> str:
    """The longest piece of the text from character `start` with at most `length` tokens."""
    low, high = 1, min(len(text) - start, CHARACTERS_PER_TOKEN * length)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[start : start + middle]) <= length:
            low = middle
        else:
            high = middle - 1
    return text[start : start + low]


def _samples(request: SampleRequest) -> Iterator[TaskSample]:
    """Consecutive windows of `request.length` tokens; raises NoData without `request.data`."""
    if request.data is None:
        raise NoData("perplexity needs data: a text file, or a folder of them", "a text")
    text, count = source.text(Path(request.data)), request.counter()
    start = 0
    for index in itertools.count() if request.samples is None else range(request.samples):
        piece = window(text, start, request.length, count)
        # The remainder is shorter than a window, and left out.
        if start + len(piece) >= len(text):
            return
        metadata = {"start": start, "tokens": count(piece)}
        yield TaskSample("perplexity", index, piece, (), chat=False, metadata=metadata)
        start += len(piece)


def _halves(request: SampleRequest) -> Iterator[TaskSample]:
    """The same windows, split: the first half is the context, the second half is scored."""
    count = request.counter()
    for whole in _samples(request):
        first = window(whole.context, 0, request.length // 2, count)
        rest = Question(whole.context[len(first) :], (), 0)
        yield replace(whole, task="continuation", context=first, questions=(rest,))


_task = partial(
    Task,
    source="mit-han-lab/streaming-llm, arXiv 2309.17453",
    benchmark="perplexity",
    group="language modelling",
    truncation="windows",
    by_likelihood=True,
)
TASKS = (
    _task("perplexity", "a book, token by token", samples=_samples, phase="stream"),
    _task(
        "continuation",
        "the second half of a book's window, after its first was compressed",
        samples=_halves,
    ),
)
