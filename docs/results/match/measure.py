# SPDX-License-Identifier: Apache-2.0
"""Score, KL, bytes and operations of small caches.

`python -m docs.results.match.measure MODEL OUT.jsonl BOOK.txt ...`

Passages of each book, with three needles each, are read as documents. Each method's cache then
reads on: the book's next tokens, whose predictions are compared with those of the full cache, and
questions for the needles, whose answers by the full cache are forced. Every method and budget has
the same passages, so ratios are of pairs. Rows of OUT that are there are not measured again.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import BaseModel, ConfigDict
from torch import Tensor

import kvfold
from kvfold.cache.copy_to_budget import observing_alike
from kvfold.cache.fork import fork
from kvfold.evidence.records import RecordFile
from kvfold.generation.readers.reconstruct import reconstruct
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.models import read_tokens
from kvfold.hf.user_text import content
from kvfold.loading import Loading, load
from kvfold.measure.cost import measured

KEYS = ["harbor", "lantern", "orchard", "compass", "velvet", "glacier", "pepper", "walnut"]
INTRODUCTION = "Some special magic numbers are hidden within the following text. Memorize them.\n"
NEEDLE = "One of the special magic numbers for {} is: {}"
QUESTION = "\nWhat is the special magic number for {} mentioned in the provided text?"
ANSWER = " The special magic number for {} mentioned in the provided text is"
METHODS = ["kvzip", "kvzip + match"]
KEPT = [0.2, 0.1, 0.05, 0.02]


class Row(BaseModel):
    """One passage, method and budget: means over the tokens that follow, and right answers.

    `operations` are those of reading, repetition and compression, as `kvfold eval` counts them. The
    seconds are of the processor, the counting included, and the first two are shared by methods
    that observe the same; `errors` are of held-out outputs before a refit and after it.
    """

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
    operations: int
    reading: float
    repetition: float
    compression: float
    errors: tuple[float, float] | None
    guarded: int

    @property
    def passage(self) -> tuple[str, int, int]:
        """The passage's name."""
        return self.text, self.seed, self.tokens

    @property
    def key(self) -> tuple[str, int, int, str, float]:
        """The row's name."""
        return *self.passage, self.method, self.kept


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
def read_on(model: Any, cache: kvfold.CompressedCache, ids: Tensor, last: int = 0) -> Tensor:
    """Logits `[S, V]` after each of the tokens `ids [1, S]`, or the `last` of them."""
    own = fork(cache)
    logits: Tensor = model(ids, past_key_values=own, use_cache=True, logits_to_keep=last).logits[0]
    return logits


@dataclass
class Judge:
    """The full cache's predictions: of the following tokens, and of its answers."""

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
        return cls(read_on(model, cache, document.following).log_softmax(-1), answers)

    def __call__(
        self, model: Any, cache: kvfold.CompressedCache, document: Document
    ) -> dict[str, Any]:
        """KL, agreement and right answers of another cache."""
        ours = read_on(model, cache, document.following).log_softmax(-1)
        kl = (self.follow.exp() * (self.follow - ours)).sum(-1).mean()
        agree = (self.follow.argmax(-1) == ours.argmax(-1)).float().mean()
        right = 0
        for asked, ids in zip(document.questions, self.answers, strict=True):
            answer = ids[0, asked.shape[1] :]
            said = read_on(model, cache, ids[:, :-1], len(answer)).argmax(-1)
            right += int(torch.equal(said, answer))
        found = {"kl": round(float(kl), 5), "agree": round(float(agree), 3)}
        return {**found, "right": right, "asked": len(self.answers)}


@dataclass
class Spent:
    """Operations, and seconds of the processor, of a block; known when it ends."""

    operations: int = 0
    seconds: float = 0.0


@contextmanager
def spent(model: Any) -> Iterator[Spent]:
    """Time of the block."""
    found, begun = Spent(), time.process_time()
    with measured(model.device) as cost:
        yield found
    found.operations = cost.operations or 0
    found.seconds = round(time.process_time() - begun, 3)


def passage(tokenizer: Any, path: Path, tokens: int, number: int) -> tuple[Document, int]:
    """Passage `number` of a book, and its seed."""
    book = " ".join(path.read_text(errors="ignore").split())
    seed = sum(path.stem.encode()) + number
    return Document.of(tokenizer, book, tokens, seed), seed


def rows(
    model: Any, tokenizer: Any, document: Document, methods: list[str], kept: list[float]
) -> Iterator[dict[str, Any]]:
    """Rows of one passage, method and budget; one reading serves a group of methods."""
    full = kvfold.compress(model, tokenizer, document.text, "full")
    judge = Judge.of(model, full.cache, document)
    before = PromptFrame.of(tokenizer).before
    ids = token_ids(tokenizer, before, content(document.text, special_tokens=False))
    for group in observing_alike(methods, kvfold.parse):
        cache = kvfold.CompressedCache(model, group[0], kept[0], tokenizer=tokenizer)
        with cache.reading():
            with spent(model) as reading:
                read_tokens(model, ids, cache, None)
            with spent(model) as repetition:
                if cache.reconstruction is not None:
                    reconstruct(model, cache, ids, None)
            for method in group:
                for part in kept:
                    with spent(model) as compression:
                        made = cache.to_budget(part, method)
                    stats = made.stats()
                    refits = [layer for layer in stats.refits if layer]
                    taken = reading, repetition, compression
                    yield {
                        "method": method,
                        "kept": part,
                        "nbytes": stats.nbytes,
                        "operations": sum(each.operations for each in taken),
                        "reading": reading.seconds,
                        "repetition": repetition.seconds,
                        "compression": compression.seconds,
                        "errors": _means(refits) if refits else None,
                        "guarded": sum(int(each[2]) for each in refits),
                        **judge(model, made, document),
                    }


def _means(refits: list[list[float]]) -> tuple[float, float]:
    """Mean errors over layers, before and after the fit."""
    before, after, *_ = zip(*refits, strict=True)
    return round(statistics.mean(before), 4), round(statistics.mean(after), 4)


def table(found: list[Row]) -> Iterator[str]:
    """One line for each budget and method, over the passages of the first method."""
    methods = list(dict.fromkeys(row.method for row in found))
    for part in sorted({row.kept for row in found}, reverse=True):
        of_budget = [row for row in found if row.kept == part]
        base = {row.passage: row for row in of_budget if row.method == methods[0]}
        for method in methods:
            own = [row for row in of_budget if row.method == method and row.passage in base]
            if own:
                yield f"{part:5} {method:40} {_line(own, [base[row.passage] for row in own])}"


def _line(own: list[Row], base: list[Row]) -> str:
    """Means of rows, and their ratios to the rows of the same passages in `base`."""
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
        f" compression {statistics.mean(row.compression for row in own):.1f} s"
        + "".join(f" {name} {error:.3f}" for name, error in zip(("held", "to"), held, strict=False))
    )


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    out: Path,
    books: list[Path],
    method: Annotated[list[str] | None, typer.Option()] = None,
    kept: Annotated[list[float] | None, typer.Option()] = None,
    tokens: int = 880,
    passages: int = 1,
) -> None:
    """Measures what is missing in OUT, and prints the table."""
    torch.set_num_threads(1)
    model, tokenizer = load(model_name, Loading(device="cpu"))
    methods, parts = method or METHODS, kept or KEPT
    records = RecordFile(out, Row)
    known = {row.key: row for row in records.load().records}
    wanted = set()
    for path in books:
        for number in range(passages):
            document, seed = passage(tokenizer, path, tokens, number)
            named = path.stem, seed, tokens
            wanted.add(named)
            missing = [
                name for name in methods if any((*named, name, part) not in known for part in parts)
            ]
            for made in rows(model, tokenizer, document, missing, parts) if missing else ():
                row = Row(text=path.stem, seed=seed, tokens=tokens, **made)
                if row.key in known:
                    continue
                records.add([row])
                known[row.key] = row
                typer.echo(f"{row.text:20} {row.kept:5} {row.method:40} KL {row.kl:.3f}")
    found = [row for row in known.values() if row.passage in wanted and row.method in methods]
    for line in table(sorted(found, key=lambda row: methods.index(row.method))):
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
