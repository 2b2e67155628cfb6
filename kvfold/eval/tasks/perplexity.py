# SPDX-License-Identifier: Apache-2.0
"""Windows of a book, to be read token by token through the compressing cache.

Source: mit-han-lab/streaming-llm `examples/eval_long_ppl.py` (Xiao et al., 2023,
arXiv 2309.17453, section 4.1): one token at a time, evict after each, perplexity is the
exponential of the mean negative log-likelihood. One forward over a window would evict nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import source
from kvfold.eval.tasks.record import Record, Request, Task

# No tokenizer of natural text makes tokens longer than this on average.
CHARACTERS_PER_TOKEN = 12


def window(text: str, start: int, length: int, count: Callable[[str], int]) -> str:
    """The longest piece from `start` that takes at most `length` tokens."""
    low, high = 1, min(len(text) - start, CHARACTERS_PER_TOKEN * length)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[start : start + middle]) <= length:
            low = middle
        else:
            high = middle - 1
    return text[start : start + low]


def _records(request: Request) -> Iterator[Record]:
    if request.data is None:
        raise KvfoldError("perplexity needs data: a text file, or a folder of them")
    text, count = source.text(Path(request.data)), request.counter()
    start = 0
    for index in itertools.count() if request.samples is None else range(request.samples):
        piece = window(text, start, request.length, count)
        # What is left over is no window.
        if start + len(piece) >= len(text):
            return
        metadata = {"start": start, "tokens": count(piece)}
        yield Record("perplexity", index, piece, (), chat=False, metadata=metadata)
        start += len(piece)


TASKS = (
    Task(
        "perplexity",
        "a book, token by token",
        "mit-han-lab/streaming-llm, arXiv 2309.17453",
        "perplexity",
        "language modelling",
        _records,
        phase="stream",
        truncation="windows",
    ),
)
