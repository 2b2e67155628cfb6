# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of every layer over passages of novels, and their picture:

    python -m docs.results.claims.measure_layers MODEL BOOKS OUT [--passages 2] [--tokens 1024]

Passages are spread evenly over each novel in the folder BOOKS (plain text files). OUT receives
`layers.jsonl`, a line for each layer of each passage, and `layers.png`. A rerun resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pydantic import BaseModel
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvfold.evidence.records import RecordFile
from kvfold.inspect.attention_maps import THRESHOLDS, LayerAttention, watch_attention

FILE, PICTURE = "layers.jsonl", "layers.png"
CHARACTERS = 10  # of a token, at most: no novel has longer ones
LAZY = 0.9  # mass above which a layer is lazy, as for Llama-3 (SimLayerKV)
LOST = 0.01  # share of the norm that may be lost (DBudgetKV)


class LayerRecord(BaseModel):
    """Statistics of one layer over one passage, means over its heads.

    attended: exp of a query's entropy, mean over queries: entries that it attends to.
    holders: share of the entries that receive nine tenths of the attention.
    variance: of the column sums.
    lazy: the last query's attention to sinks and window.
    steady: share of the queries of the second half that are lazy, or not, as the last one is.
    kept: share of the entries that hold the norm of the last query's attention up to `LOST`.
    """

    book: str
    passage: int
    layer: int
    attended: float
    holders: float
    variance: float
    lazy: float
    steady: float
    kept: float


def record(book: str, passage: int, layer: LayerAttention) -> LayerRecord:
    tokens = len(layer.edges)
    second = layer.edges[tokens // 2 :] > LAZY
    at = int(np.argmin([abs(threshold - LOST) for threshold in THRESHOLDS]))
    return LayerRecord(
        book=book,
        passage=passage,
        layer=layer.index,
        attended=float(layer.entropy.exp().mean()),
        holders=float(layer.holders.float().mean()) / tokens,
        variance=float(layer.variance.mean()),
        lazy=layer.lazy,
        steady=float((second == (layer.lazy > LAZY)).float().mean()),
        kept=float(layer.kept[at]) / tokens,
    )


def passages(
    books: Path, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int
) -> Iterator[tuple[str, int, Tensor]]:
    """Novel, number and ids `[1, tokens]` of `count` passages of each novel."""
    for path in sorted(books.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        for number in range(count):
            start = len(text) * (2 * number + 1) // (2 * count)
            part = text[start : start + CHARACTERS * tokens]
            yield path.stem, number, tokenizer(part, return_tensors="pt").input_ids[:, :tokens]


PANELS = (
    ("attended", "entries that a query attends to (exp of its entropy)", "log"),
    ("variance", "variance of the column sums", "log"),
    ("lazy", "attention to sinks and window", "linear"),
    ("kept", "entries that hold the norm up to 1 %, share", "linear"),
)


def picture(records: list[LayerRecord]) -> Figure:
    """Each statistic over layers: the mean over passages, and a band from minimum to maximum."""
    figure = Figure(figsize=(11, 6), dpi=110, layout="constrained")
    layers = sorted({each.layer for each in records})
    for panel, (name, title, scale) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        found = [[getattr(r, name) for r in records if r.layer == layer] for layer in layers]
        low, mean, high = ([function(each) for each in found] for function in (min, np.mean, max))
        panel.fill_between(layers, low, high, color="#c6dbf0", linewidth=0, label="passages")
        panel.plot(layers, mean, color="#08306b", marker="o", markersize=3, label="mean")
        panel.set_yscale(scale)
        panel.set_title(title, loc="left", fontsize=9)
        panel.set_xlabel("layer", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[2].axhline(LAZY, color="#888888", linewidth=1, linestyle="--", label="lazy above")
    figure.axes[2].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--passages", type=int, default=2, help="of each novel")
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    store = RecordFile(given.out / FILE, LayerRecord)
    records = list(store.load().records)
    done = {(each.book, each.passage) for each in records}
    texts = list(passages(given.books, tokenizer, given.passages, given.tokens))
    for book, number, ids in track(texts, "passages"):
        if (book, number) not in done:
            new = [record(book, number, layer) for layer in watch_attention(model, ids)]
            store.add(new)
            records += new
    picture(records).savefig(given.out / PICTURE)


if __name__ == "__main__":
    main()
