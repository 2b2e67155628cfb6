# SPDX-License-Identifier: Apache-2.0
"""Time to shrink a stored context without the model, equal to compressing it at once.

`python -m docs.results.zap.shrink MODEL SCORER TEXT.txt`: TEXT is read once and kept by zap at a
half and at a fifth; the larger context is then shrunk to the smaller one's budget.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from kvfold.contexts.context import compress_each
from kvfold.loading import Loading, load


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    scorer: Path,
    text: Path,
    tokens: int = 8000,
    threads: Annotated[list[int] | None, typer.Option()] = None,
    rounds: int = 5,
) -> None:
    """Asserts equality, and prints the median and the range of the times."""
    model, tokenizer = load(model_name, Loading())
    book = " ".join(text.read_text(encoding="utf-8").split())
    ids = tokenizer(book[: 8 * tokens], add_special_tokens=False).input_ids[:tokens]
    document = str(tokenizer.decode(ids))
    method = f"zap:file={scorer}"
    large, small = compress_each(model, tokenizer, document, method, [0.5, 0.2], prefill_chunk=1024)
    for count in threads or [1, 2]:
        torch.set_num_threads(count)
        times = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            shrunk = large.shrink(0.2)
            times.append(time.perf_counter() - begun)
        for one, other in zip(shrunk.cache.states, small.cache.states, strict=True):
            mine, theirs = one.stored().named(), other.stored().named()
            assert mine.keys() == theirs.keys()
            for name, parts in mine.items():
                assert all(map(torch.equal, parts, theirs[name])), name
        times = times[1:]  # without the first one, which also warms up
        typer.echo(
            f"{large.ids.shape[1]} tokens, 0.5 → 0.2, {count} threads, equal to compressing at "
            f"once: {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
        )


if __name__ == "__main__":
    typer.run(main)
