# SPDX-License-Identifier: Apache-2.0
"""Recall beside eviction on novels, before the rest of the text is known:

    python -m docs.results.recall.measure MODEL OUT.jsonl BOOK.txt …

Each method compresses 900 tokens of each book; the next 120 are then read. A row has the mean KL
divergence from the full cache, in nats per token, of a float32 model, and bytes over those of a
full cache of 16-bit numbers. Rows of recall have also the share of a step's cold entries that the
step before had read, of the tokens read one by one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.kernels.cold import PIECE
from kvfold.kernels.native import attention as native
from kvfold.kernels.recalled import RecalledKeys
from kvfold.store.base import Store
from kvfold.store.ragged import RaggedStore

FIRST, CONTEXT, READ = 60_000, 900, 120  # characters left out, tokens
HOT = 2 << PIECE  # number of the first hot row
METHODS = [
    *[(f"recall:read={read}", None) for read in (0.01, 0.02, 0.05, 0.1)],
    *[(f"recall:{option}", None) for option in ("keys=1", "keys=3", "cold=4")],
    *[("snapkv + recall", budget) for budget in (0.05, 0.1)],
    *[(name, budget) for name in ("kvzip", "snapkv") for budget in (0.1, 0.12, 0.2, 0.3)],
]


@contextmanager
def reads() -> Iterator[list[Tensor]]:
    """What each call of a layer reads inside the block: rows, and how many of each segment."""
    found: list[Tensor] = []
    find = native.find_cold

    def noting(*arguments: Any) -> Any:
        at, counts = find(*arguments)
        found.append(at)
        return at, counts

    with patch.object(native, "find_cold", noting):
        yield found


def overlap(context: kvfold.Context, ids: Tensor) -> float:
    """Share of a step's cold entries that the step before had read, of all layers and heads."""
    layers, shares = len(context.cache.states), []
    hot = {place for state in context.cache.states for place in _hot(state.stored())}
    with context.cache.frozen(), reads() as found:
        for token in ids.split(1, 1):
            context.model(token, past_key_values=context.cache)
        context.cache.crop(-ids.shape[1])
    for before, now in zip(found, found[layers:], strict=False):
        one, other = set(before.tolist()) - hot, set(now.tolist()) - hot
        shares.append(len(one & other) / max(1, len(other)))
    return sum(shares) / len(shares)


def _hot(store: Store) -> range:
    """Numbers that rows of hot entries have."""
    assert isinstance(store, RaggedStore)
    keys = store.segments().keys.encoded
    assert isinstance(keys, RecalledKeys)
    return range(HOT, HOT + len(keys.hot.rows))


@torch.no_grad()
def rows(
    model: Any, tokenizer: Any, book: Path, share: Callable[[str, float | None], float]
) -> Iterator[dict[str, Any]]:
    """A row for each method, whose bytes `share` gives."""
    text = book.read_text(encoding="utf-8", errors="ignore")[FIRST : FIRST + 20 * CONTEXT]
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    document, rest = str(tokenizer.decode(ids[:CONTEXT])), ids[None, CONTEXT : CONTEXT + READ]

    def logits(context: kvfold.Context) -> Tensor:
        with context.cache.frozen():
            found: Tensor = (
                model(rest, past_key_values=context.cache).logits.double().log_softmax(-1)
            )
            context.cache.crop(-READ)
        return found

    expected = logits(kvfold.compress(model, tokenizer, document, "full"))
    for method, budget in METHODS:
        context = kvfold.compress(model, tokenizer, document, method, budget)
        difference = expected - logits(context)
        row = {"book": book.name, "method": method, "budget": budget}
        row["kl"] = (expected.exp() * difference).sum(-1).mean().item()
        if method.startswith("recall"):
            row["overlap"] = overlap(context, rest[:, :40])
        yield row | {"bytes": share(method, budget)}


@torch.no_grad()
def bytes_in_16_bits(name: str, method: str, budget: float | None) -> float:
    """Bytes of a context of as many tokens, over those of the full cache; the same for any text."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    words = str(tokenizer.decode(torch.arange(1000, 1000 + CONTEXT)))
    stats = kvfold.compress(model, tokenizer, words, method, budget).stats()
    return stats.nbytes / stats.nbytes_full


def main() -> None:
    """Writes the rows as they are done; those that the file has are not made again."""
    name, out, *books = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    share = cache(partial(bytes_in_16_bits, name))
    path = Path(out)
    done = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {json.loads(line)["book"] for line in done}
    for book in map(Path, books):
        if book.name in known:
            continue
        made = list(rows(model, tokenizer, book, share))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
        print(f"{book.name}: {len(made)} rows", flush=True)


if __name__ == "__main__":
    main()
