# SPDX-License-Identifier: Apache-2.0
"""Cost of a drop, and what many of them add up to: `python -m benchmarks.edits [MODEL]`.

On Python's language reference. Cost: operations of dropping 50 tokens, every written element
included, over those of reading again what follows. Drift, in bfloat16: keys after 100 drops of 3
tokens, one after the other and all at once, beside one rotation of the keys as they came; and the
KL of both to it, in the predictions of the text's next tokens.
"""

from __future__ import annotations

import argparse
import random
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import kvfold
from kvfold.cache.fork import fork
from kvfold.checks.measure import distances
from tests.helpers.operations import Operations

START, DROPPED, FOLLOWING = 100, 50, 64
DROPS, LENGTH = 100, 3


@torch.no_grad()
def read(
    model: PreTrainedModel, ids: Tensor, method: str = "full", budget: float | None = None
) -> kvfold.CompressedCache:
    """A cache that has read `ids [1, N]`."""
    cache = kvfold.CompressedCache(model, method, budget)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def cost(model: PreTrainedModel, ids: Tensor, method: str, budget: float | None) -> float:
    """Operations of a drop over those of reading what follows again."""
    edited, again = read(model, ids, method, budget), read(model, ids[:, :START])
    with Operations() as dropping:
        edited.drop((START, START + DROPPED))
    with Operations() as reading:
        model(ids[:, START + DROPPED :], past_key_values=again, logits_to_keep=1)
    ratio: float = dropping.count / reading.count
    return ratio


def spans_to_drop(tokens: int) -> list[tuple[int, int]]:
    """Spans of the text, in a random order of dropping."""
    starts = random.Random(0).sample(range(10, tokens - 10, LENGTH), DROPS)
    return [(start, start + LENGTH) for start in starts]


def rotated_once(cache: kvfold.CompressedCache, came: list[Tensor], stay: Tensor) -> None:
    """Gives a cache the keys `came` of the tokens that `stay`, rotated once."""
    by = (torch.arange(len(stay)) - stay)[None]
    for state, keys in zip(cache.states, came, strict=True):
        state.stored().dense()[0].copy_(state.plan.rotation(keys[:, :, stay], by))


def drift(model: PreTrainedModel, ids: Tensor) -> None:
    """Prints the distance of edited keys to keys that were rotated once, and the KL."""
    text, following = ids[:, :-FOLLOWING], ids[:, -FOLLOWING:]
    spans = spans_to_drop(text.shape[1])
    caches = {name: read(model, text) for name in ("once", "at once", "one by one")}
    came = [state.stored().dense()[0].clone() for state in caches["once"].states]
    gone = {token for span in spans for token in range(*span)}
    stay = torch.tensor([token for token in range(text.shape[1]) if token not in gone])
    for name in ("once", "at once"):
        caches[name].drop(*spans)
    rotated_once(caches["once"], came, stay)
    for number, (start, stop) in enumerate(spans):
        before = sum(LENGTH for earlier, _ in spans[:number] if earlier < start)
        caches["one by one"].drop((start - before, stop - before))
    exact = torch.cat([s.stored().dense()[0].flatten() for s in caches["once"].states]).double()
    with torch.no_grad():
        logits = {
            name: model(following, past_key_values=fork(cache)).logits[0]
            for name, cache in caches.items()
        }
    for name in ("at once", "one by one"):
        keys = torch.cat([s.stored().dense()[0].flatten() for s in caches[name].states]).double()
        kl = distances(logits["once"], logits[name], following[0]).kl.mean()
        print(
            f"{DROPS} drops {name}: keys off by {(keys - exact).norm() / exact.norm():.2%}, "
            f"mean KL {kl:.5f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=".models/smollm2")
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, rounding = (
        AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    text = "\n\n".join(topics.values())
    ids = AutoTokenizer.from_pretrained(arguments.model)(text, return_tensors="pt").input_ids
    ids = ids[:, : arguments.tokens]
    for method, budget in (("full", None), ("snapkv", 0.5), ("adakv", 0.5)):
        part = cost(model, ids, method, budget)
        print(f"a drop from {method}: {part:.3%} of reading what follows again", flush=True)
    drift(rounding, ids)


if __name__ == "__main__":
    main()
