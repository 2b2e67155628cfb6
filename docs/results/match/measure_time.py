# SPDX-License-Identifier: Apache-2.0
"""Time of a refit beside KVzip's repetition of the text.

`python -m docs.results.match.measure_time MODEL BOOK.txt`

A method that repeats the text compresses one passage, with match and without. What match adds is
its reference queries during the repetition, and the fit; both as parts of the plain repetition, in
seconds of one processor, the shortest of several rounds in which all take turns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import kvfold
from docs.results.match.measure import KEPT, passage
from kvfold.generation.readers.reconstruct import reconstruct
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_tokens
from kvfold.hf.user_text import content
from kvfold.loading import Loading, load

Times = dict[str, float]


def once(model: Any, tokenizer: Any, ids: Tensor, method: str) -> Times:
    """Seconds of the parts of one compression: reading, repetition, and each budget."""
    cache, found = kvfold.CompressedCache(model, method, KEPT[0], tokenizer=tokenizer), {}

    def note(part: str, begun: float) -> None:
        found[part] = time.process_time() - begun

    with cache.reading():
        begun = time.process_time()
        read_tokens(model, ids, cache, None)
        note("reading", begun)
        begun = time.process_time()
        reconstruct(model, cache, ids, None)
        note("repetition", begun)
        for part in KEPT:
            begun = time.process_time()
            cache.to_budget(part)
            note(f"{part:g}", begun)
    return found


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    book: Path,
    method: str = "kvzip",
    refit: Annotated[list[str] | None, typer.Option()] = None,
    tokens: int = 880,
    rounds: int = 3,
) -> None:
    """Prints a line for each refit and budget."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, Loading(device="cpu"))
    before = PromptFrame.of(tokenizer).before
    document, _ = passage(tokenizer, book, tokens, 0)
    ids = token_ids(tokenizer, before, content(document.text, special_tokens=False))
    refits = [f"{method} + {each}" for each in refit or ["match", "match:queries=1024"]]
    best: dict[str, Times] = defaultdict(dict)
    for _ in range(rounds):
        for each in (method, *refits):
            for part, seconds in once(model, tokenizer, ids, each).items():
                best[each][part] = min(seconds, best[each].get(part, seconds))
    plain = best[method]
    typer.echo(f"reading {plain['reading']:.2f} s, repetition {plain['repetition']:.2f} s")
    for each in refits:
        noted = best[each]["repetition"] - plain["repetition"]
        for part in map("{:g}".format, KEPT):
            fit = best[each][part] - plain[part]
            ratio = (noted + fit) / plain["repetition"]
            typer.echo(f"{each:50} {part:5} queries {noted:.2f} s, fit {fit:.2f} s: x{ratio:.2f}")


if __name__ == "__main__":
    typer.run(main)
