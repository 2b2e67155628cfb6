# SPDX-License-Identifier: Apache-2.0
"""Loss of the next tokens with and without merging of evicted entries.

`python -m docs.results.merging.measure MODEL BOOKS OUT.jsonl`: passages of each novel in the
folder BOOKS (plain text files), 700 tokens to compress and the next 120, whose loss is compared,
passage by passage, with that of the same method without merging. The next tokens are read in one
forward, which measures the prompt's compression only; with `--one-by-one` they are read as in
decoding, with further evictions. A rerun resumes; docs/results/merging/rows.jsonl holds the
published ones.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from rich.progress import track
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import kvfold
from kvfold.evidence.intervals import of_mean
from kvfold.evidence.records import RecordFile

PROMPT, NEXT = 700, 120
CHARACTERS = 10 * (PROMPT + NEXT)  # no novel has tokens so long
KEPT = (0.1, 0.2)
# Each method that merges, and the same method without merging.
PAIRS = {
    "h2o + merge": "h2o",
    "h2o + merge:rule=cam": "h2o",
    "d2o": "d2o:merge=none",
    "knorm + merge": "knorm",
    "cam": "streaming_llm_original",
}


class Record(BaseModel):
    """Mean loss of a passage's next tokens; `kept` is 1 for the full cache."""

    book: str
    passage: int
    method: str
    kept: float
    one_by_one: bool
    loss: float


@dataclass(frozen=True)
class Passages:
    """One passage of every novel: ids `[B, PROMPT + NEXT]`."""

    number: int
    books: list[str]
    ids: Tensor


def passages(folder: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[Passages]:
    """`count` passages spread evenly over each novel: the first of each novel, then the second …"""
    novels = {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    for number in range(count):
        rows = []
        for text in novels.values():
            start = len(text) * (2 * number + 1) // (2 * count)
            ids = tokenizer(text[start : start + CHARACTERS], return_tensors="pt").input_ids
            rows.append(ids[:, : PROMPT + NEXT])
        yield Passages(number, list(novels), torch.cat(rows))


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor) -> tuple[kvfold.CompressedCache, Tensor]:
    """A cache with the uncompressed prompt and its column sums, and the last logits."""
    cache = kvfold.CompressedCache(model, "h2o", 1.0)
    cache.phase.reading = True
    out = model(ids[:, :PROMPT], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, out.logits


def compressed(
    whole: kvfold.CompressedCache, model: PreTrainedModel, method: str, kept: float
) -> kvfold.CompressedCache:
    """A copy of the prompt's cache, compressed by `method`."""
    cache = copy.deepcopy(whole)
    fresh = kvfold.CompressedCache(model, method, None if method == "full" else kept)
    for layer, planned in zip(cache.states, fresh.states, strict=True):
        layer.plan = planned.plan
        layer.observers = layer.observers.adopted(planned.plan.stages.needs, {})
    with cache.reading():
        pass
    return cache


@torch.no_grad()
def losses(
    model: PreTrainedModel,
    cache: kvfold.CompressedCache,
    logits: Tensor,
    ids: Tensor,
    one_by_one: bool,
) -> list[float]:
    """Mean loss of each row's last `NEXT` tokens after the compressed prompt."""
    pieces = ids[:, PROMPT:-1].split(1 if one_by_one else NEXT, 1)
    with nullcontext() if one_by_one else cache.frozen():
        later = [model(piece, past_key_values=cache, use_cache=True).logits for piece in pieces]
    predicted = torch.cat([logits, *later], 1).float().mT
    return F.cross_entropy(predicted, ids[:, PROMPT:], reduction="none").mean(-1).tolist()


def full_loss(records: Sequence[Record]) -> float:
    """Mean loss of the full cache."""
    return mean([r.loss for r in records if r.method == "full"])


def table(records: Sequence[Record]) -> list[str]:
    """Lines of mean losses, and differences with 95 % intervals over the novels' means."""
    loss = {(r.method, r.kept, r.book, r.passage): r.loss for r in records}
    lines = [
        "| kept | method | loss | without merging | its loss | difference (95 %) | worse |",
        "|---|---|---|---|---|---|---|",
    ]
    for kept, (merged, plain) in product(KEPT, PAIRS.items()):
        pairs = {
            key[2:]: (loss[key], loss[plain, *key[1:]])
            for key in loss
            if key[:2] == (merged, kept) and (plain, *key[1:]) in loss
        }
        changes = defaultdict[str, list[float]](list)
        for (book, _), (with_it, without) in pairs.items():
            changes[book].append(with_it - without)
        if len(changes) < 2:
            continue
        with_it, without = (mean(losses) for losses in zip(*pairs.values(), strict=True))
        of_novels = [mean(each) for each in changes.values()]
        _, low, high = of_mean(np.array(of_novels))
        worse = sum(change > 0 for each in changes.values() for change in each)
        line = (
            f"| {kept} | {merged} | {with_it:.3f} | {plain} | {without:.3f} "
            f"| {with_it - without:+.3f} ({low:+.3f} to {high:+.3f}) | {worse} of {len(pairs)} |"
        )
        lines.append(line.replace("-", "−"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--passages", type=int, default=5, help="of each novel")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--merging", nargs="+", choices=PAIRS, default=list(PAIRS))
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    store = RecordFile(arguments.out, Record)
    one_by_one = arguments.one_by_one
    records = [r for r in store.load().records if r.one_by_one == one_by_one]
    done = {(r.method, r.kept, r.passage) for r in records}
    methods = dict.fromkeys(
        name for merged in arguments.merging for name in (PAIRS[merged], merged)
    )
    runs = [("full", 1.0), *((method, kept) for kept in KEPT for method in methods)]
    for text in passages(arguments.books, tokenizer, arguments.passages):
        left = [run for run in runs if (*run, text.number) not in done]
        if not left:
            continue
        whole, logits = read(model, text.ids)
        for method, kept in track(left, f"passage {text.number + 1} of every novel"):
            cache = compressed(whole, model, method, kept)
            found = losses(model, cache, logits, text.ids, one_by_one)
            new = [
                Record(
                    book=book,
                    loss=loss,
                    one_by_one=one_by_one,
                    passage=text.number,
                    method=method,
                    kept=kept,
                )
                for book, loss in zip(text.books, found, strict=True)
            ]
            store.add(new)
            records += new
    print(f"full cache: {full_loss(records):.3f}", *table(records), sep="\n")


if __name__ == "__main__":
    main()
