# SPDX-License-Identifier: Apache-2.0
"""Generation of samples of a given length, reproducible from the seed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvfold.errors import KvfoldError
from kvfold.eval.tasks.base import SampleRequest, TaskSample

# Samples per task and length, as in RULER and the key-value papers.
SAMPLES = 500

# Makes a sample from haystack size, random generator and sample number.
Build = Callable[[int, random.Random, int], TaskSample]


def fitted(
    request: SampleRequest, name: str, build: Build, least: int, most: int | None = None
) -> Iterator[TaskSample]:
    """The request's number of samples, each as long as fits into its `length` with the answer.

    The haystack's size is searched between `least` and `most`, in the unit of `build`.
    `metadata["tokens"]` is the length of prompt plus answer. Raises KvfoldError if `length` cannot
    hold a haystack of size `least`.
    """
    count = request.counter()
    for index in range(SAMPLES if request.samples is None else request.samples):
        seed = f"{request.seed} {name} {request.length} {index}"

        def made(size: int, seed: str = seed, index: int = index) -> TaskSample:
            return build(size, random.Random(seed), index)

        def taken(size: int) -> int:
            return tokens(made(size), count)

        sample = made(largest_haystack(taken, request.length, least, most, name))
        metadata = {**sample.metadata, "tokens": tokens(sample, count), "seed": request.seed}
        yield replace(sample, index=index, metadata=metadata)


def largest_haystack(
    size: Callable[[int], int], limit: int, least: int, most: int | None = None, what: str = "it"
) -> int:
    """The largest n found from `least` to `most` with `size(n)` at most `limit` tokens.

    Interpolation search: it assumes that sizes grow about linearly, so few are computed. `what` is
    named in the error. Raises KvfoldError if `least` does not fit; RULER's own search never ends
    there.
    """
    low, used = least, size(least)
    if used > limit:
        raise KvfoldError(f"{limit} tokens cannot hold {what}, which takes at least {used}")
    high: int | None = None if most is None else most + 1
    over: int | None = None
    while high is None or high - low > 1:
        if high is None or over is None:
            guess = low + max(1, (limit - used) * low // max(used, 1))
        else:
            guess = low + (high - low) * (limit - used) // (over - used)
        if high is not None:
            guess = min(max(guess, low + 1), high - 1)
        tokens = size(guess)
        if tokens <= limit:
            low, used = guess, tokens
        else:
            high, over = guess, tokens
    return low


def tokens(sample: TaskSample, count: Callable[[str], int]) -> int:
    """Maximal tokens of prompt plus answer over the questions; of a conversation, all turns."""
    asked = [count(q.text + q.answer_prefix) + q.max_new_tokens for q in sample.questions]
    if sample.conversation:
        return count(sample.context) + sum(asked)
    # Counted as one text: concatenation can reduce the number of tokens.
    whole = [count(sample.prompt(q)) + q.max_new_tokens for q in sample.questions]
    return max(whole, default=count(sample.context))


def number(rng: random.Random, digits: int = 7) -> str:
    """A random number of so many digits, without leading 0."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def identifier(rng: random.Random) -> str:
    """A random UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
