# SPDX-License-Identifier: Apache-2.0
"""KL to the full cache of refitted and plain entries: `match_kl.py MODEL OUT.jsonl BOOK.txt ...`.

A passage of each book with three needles is read as a document. Each method's cache then reads on:
the book's next tokens, whose predictions are compared with those of the full cache, and questions
for the needles, whose answers by the full cache are forced. Every method and budget has the same
passages, so ratios are of pairs. Rows of OUT that are there are not measured again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel, ConfigDict
from torch import Tensor

import kvfold
from kvfold.cache.fork import fork
from kvfold.contexts.context import compress_each
from kvfold.hf.chat_template import PromptFrame
from kvfold.jobs.records import RecordFile
from kvfold.loading import Loading, load

KEYS = ["harbor", "lantern", "orchard", "compass", "velvet", "glacier", "pepper", "walnut"]
INTRODUCTION = "Some special magic numbers are hidden within the following text. Memorize them.\n"
NEEDLE = "One of the special magic numbers for {} is: {}"
QUESTION = "\nWhat is the special magic number for {} mentioned in the provided text?"
ANSWER = " The special magic number for {} mentioned in the provided text is"
METHODS = ["kvzip", "kvzip + match"]


class Row(BaseModel):
    """One document, method and budget: means over the tokens that follow, and right answers."""

    model_config = ConfigDict(frozen=True)

    text: str
    seed: int
    tokens: int
    method: str
    kept: float
    kl: float
    agree: float
    right: int
    asked: int
    nbytes: int
    errors: tuple[float, float] | None
    guarded: float
    seconds: float  # of one reading, with the fit at all budgets

    @property
    def key(self) -> tuple[str, int, int, str, float]:
        """What names a row."""
        return self.text, self.seed, self.tokens, self.method, self.kept


@dataclass(frozen=True)
class Document:
    """A passage with needles, the tokens that follow it, and questions."""

    text: str
    following: Tensor
    questions: list[Tensor]

    @classmethod
    def of(cls, tokenizer: Any, book: str, tokens: int, seed: int, between: str = ". ") -> Document:
        """A passage of `book`, about `tokens` long; needles stand where `between` parts it."""
        rng = random.Random(seed)
        begin = book.index(between, rng.randrange(len(book) // 4, len(book) * 3 // 4))
        start = begin + len(between)
        ids = tokenizer(book[start : start + 8 * tokens], add_special_tokens=False).input_ids
        own = tokens - 100  # needles and the introduction take about 100
        sentences = tokenizer.decode(ids[:own]).split(between)
        keys = rng.sample(KEYS, 3)
        for key in keys:
            number = rng.randrange(1000000, 9999999)
            sentences.insert(rng.randrange(1, len(sentences) - 1), NEEDLE.format(key, number))
        frame = PromptFrame.of(tokenizer)
        asked = [QUESTION.format(key) + frame.after + ANSWER.format(key) for key in keys]
        questions = [
            torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]) for text in asked
        ]
        following = torch.tensor([ids[own : own + 100]])
        return cls(INTRODUCTION + between.join(sentences), following, questions)


@torch.no_grad()
def read_on(model: Any, cache: kvfold.CompressedCache, ids: Tensor) -> Tensor:
    """Log-probabilities `[S, V]` after each of the tokens `ids [1, S]`."""
    logits: Tensor = model(ids, past_key_values=fork(cache), use_cache=True).logits[0]
    return logits.log_softmax(-1)


@dataclass
class Judge:
    """What the full cache predicts: of the following tokens, and of its answers."""

    follow: Tensor
    answers: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, cache: kvfold.CompressedCache, document: Document) -> Judge:
        """The full cache's predictions."""
        answers = []
        for question in document.questions:
            ids, own = question, fork(cache)
            logits = model(ids, past_key_values=own, use_cache=True).logits
            for _ in range(8):
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
                logits = model(ids[:, -1:], past_key_values=own, use_cache=True).logits
            answers.append(torch.cat([ids, logits[:, -1:].argmax(-1)], 1))
        return cls(read_on(model, cache, document.following), answers)

    def __call__(
        self, model: Any, cache: kvfold.CompressedCache, document: Document
    ) -> dict[str, Any]:
        """KL, agreement and right answers of another cache."""
        ours = read_on(model, cache, document.following)
        kl = (self.follow.exp() * (self.follow - ours)).sum(-1).mean()
        agree = (self.follow.argmax(-1) == ours.argmax(-1)).float().mean()
        right = 0
        for asked, ids in zip(document.questions, self.answers, strict=True):
            said = read_on(model, cache, ids[:, :-1]).argmax(-1)[asked.shape[1] - 1 :]
            right += int(torch.equal(said, ids[0, asked.shape[1] :]))
        asked_all = len(self.answers)
        return {"kl": float(kl), "agree": float(agree), "right": right, "asked": asked_all}


def rows(
    model: Any, tokenizer: Any, path: Path, tokens: int, methods: list[str], kept: list[float]
) -> Iterator[Row]:
    """All rows of one book."""
    book = " ".join(path.read_text(errors="ignore").split())
    seed = sum(path.stem.encode())
    document = Document.of(tokenizer, book, tokens, seed)
    full = kvfold.compress(model, tokenizer, document.text, "full")
    judge = Judge.of(model, full.cache, document)
    for method in methods:
        begun = time.process_time()
        contexts = list(compress_each(model, tokenizer, document.text, method, kept))
        seconds = time.process_time() - begun
        for part, context in zip(kept, contexts, strict=True):
            stats = context.stats()
            refits = [layer for layer in stats.refits if layer]
            yield Row(
                text=path.stem,
                seed=seed,
                tokens=tokens,
                method=method,
                kept=part,
                nbytes=stats.nbytes,
                errors=_means(refits) if refits else None,
                guarded=sum(each[2] for each in refits),
                seconds=seconds,
                **judge(model, context.cache, document),
            )


def _means(refits: list[list[float]]) -> tuple[float, float]:
    """Mean errors over layers, before and after the fit."""
    before, after, *_ = zip(*refits, strict=True)
    return statistics.mean(before), statistics.mean(after)


def table(found: list[Row]) -> Iterator[str]:
    """One line for each budget and method, over the texts of the first method."""
    methods = list(dict.fromkeys(row.method for row in found))
    for part in sorted({row.kept for row in found}, reverse=True):
        of_budget = [row for row in found if row.kept == part]
        base = {row.text: row for row in of_budget if row.method == methods[0]}
        for method in methods:
            own = [row for row in of_budget if row.method == method and row.text in base]
            if own:
                yield f"{part:5} {method:40} {_line(own, [base[row.text] for row in own])}"


def _line(own: list[Row], base: list[Row]) -> str:
    """Means of rows, and their ratios to the rows of the same texts in `base`."""
    pairs = list(zip(own, base, strict=True))
    kl = statistics.mean(row.kl for row in own)
    errors = [row.errors for row in own if row.errors is not None]
    held = [statistics.mean(each[i] for each in errors) for i in (0, 1)] if errors else []
    return (
        f"KL {kl:.3f} x{kl / statistics.mean(row.kl for row in base):.2f}"
        f" lower {sum(row.kl < other.kl for row, other in pairs)}/{len(pairs)}"
        f" agree {statistics.mean(row.agree for row in own):.2f}"
        f" right {sum(row.right for row in own)}/{sum(row.asked for row in own)}"
        f" bytes x{statistics.mean(row.nbytes / other.nbytes for row, other in pairs):.3f}"
        f" {statistics.mean(row.seconds for row in own):.0f} s"
        + "".join(f" {name} {error:.3f}" for name, error in zip(("held", "to"), held, strict=False))
    )


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    out: Path,
    books: list[Path],
    method: Annotated[list[str] | None, typer.Option()] = None,
    kept: Annotated[list[float] | None, typer.Option()] = None,
    tokens: int = 880,
) -> None:
    """Measures what is missing in OUT, and prints the table."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, Loading())
    methods, parts = method or METHODS, kept or [0.2, 0.1, 0.05]
    records = RecordFile(out, Row)
    known = {row.key: row for row in records.load().records}
    for path in books:
        seed = sum(path.stem.encode())
        missing = [
            name
            for name in methods
            if any((path.stem, seed, tokens, name, part) not in known for part in parts)
        ]
        if missing:
            for row in rows(model, tokenizer, path, tokens, missing, parts):
                records.add([row])
                known[row.key] = row
                typer.echo(f"{row.text:20} {row.kept:5} {row.method:40} KL {row.kl:.3f}")
    wanted = {path.stem for path in books}
    found = [known[key] for key in known if key[0] in wanted and key[3] in methods]
    order = {name: number for number, name in enumerate(methods)}
    for line in table(sorted(found, key=lambda row: order[row.method])):
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
