# SPDX-License-Identifier: Apache-2.0
"""The movement of answers when all heads keep one set of tokens in place of their own.

    python -m docs.results.levelled.measure MODEL docs/results/levelled/rows.jsonl BOOK.txt ...

A passage from the middle of each book is compressed, levelled by each rule, and asked what it is
about. KL is the mean over next tokens along that answer: to the heads' own sets, and of both to the
whole text. Rows that are there are not measured again; the means over texts are printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel, ConfigDict

import kvfold
from kvfold.contexts.levelled import QUESTION, distance
from kvfold.evidence.records import RecordFile
from kvfold.loading import Loading, load
from kvfold.methods.stages.select.one_set import Rule

METHODS = ("kvzip", "adakv", "pyramidkv")
RULES: tuple[Rule, ...] = ("mass", "votes", "union")
HEAD = (
    "| method | rule | part of the tokens | KL to own sets | own sets' KL to the whole text "
    "| KL to the whole text |"
)


class Row(BaseModel):
    """One text, method and rule; KL in nats a token, along an answer of `answer` tokens."""

    model_config = ConfigDict(frozen=True)

    text: str
    tokens: int
    budget: float
    method: str
    rule: str
    kept: int  # tokens of the one set
    answer: int
    to_own: float
    own_to_full: float
    to_full: float


def passage(tokenizer: Any, path: Path, tokens: int) -> str:
    """About `tokens` tokens from the middle of a book."""
    words = path.read_text(encoding="utf-8", errors="ignore").split()
    ids = tokenizer(" ".join(words[len(words) // 2 :][:tokens]), add_special_tokens=False).input_ids
    text: str = tokenizer.decode(ids[:tokens])
    return text


def rows(model: Any, tokenizer: Any, path: Path, tokens: int, budget: float) -> Iterator[Row]:
    """The rows of one book, method by method."""
    document = passage(tokenizer, path, tokens)
    full = kvfold.compress(model, tokenizer, document, "full")
    asked = full.chat().question_ids(QUESTION, "", special_tokens=False)
    for method in METHODS:
        own = kvfold.compress(model, tokenizer, document, method, budget)
        own_to_full, answer = distance(full, own.cache, asked)
        for rule in RULES:
            made = own.levelled(rule)
            assert made.level is not None
            yield Row(
                text=path.stem,
                tokens=full.ids.shape[1],
                budget=budget,
                method=method,
                rule=rule,
                kept=made.level.tokens,
                answer=answer,
                to_own=made.level.kl,
                own_to_full=own_to_full,
                to_full=distance(full, made.cache, asked)[0],
            )


def table(found: Sequence[Row]) -> Iterator[str]:
    """Lines of a Markdown table: means over texts, and the range of the KL to own sets."""
    yield from (HEAD, "|---" * (HEAD.count("|") - 1) + "|")
    for method, rule in product(METHODS, RULES):
        own = [row for row in found if (row.method, row.rule) == (method, rule)]
        part = statistics.mean(row.kept / row.tokens for row in own)
        moved = [row.to_own for row in own]
        yield (
            f"| `{method}` | `{rule}` | {part:.2f} "
            f"| {statistics.mean(moved):.3f} ({min(moved):.3f} to {max(moved):.3f}) "
            f"| {statistics.mean(row.own_to_full for row in own):.3f} "
            f"| {statistics.mean(row.to_full for row in own):.3f} |"
        )


def main(
    model: str,
    out: Path,
    books: list[Path],
    tokens: Annotated[int, typer.Option(help="Tokens of a passage, about.")] = 1024,
    budget: Annotated[float, typer.Option(help="Part of the entries that heads keep.")] = 0.3,
) -> None:
    """Measures books that OUT lacks, and prints means."""
    torch.set_num_threads(1)
    network, tokenizer = load(model, Loading())
    records = RecordFile(out, Row)
    known = {row.text for row in records.load().records}
    for book in books:
        if book.stem not in known:
            records.add(rows(network, tokenizer, book, tokens, budget))
            print(book.stem, flush=True)
    print("\n".join(table(records.load().records)))


if __name__ == "__main__":
    typer.run(main)
