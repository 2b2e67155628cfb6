# SPDX-License-Identifier: Apache-2.0
"""Samples made on the spot: each as long as asked for, the same again from the same seed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvfold.eval.tasks.length import largest
from kvfold.eval.tasks.record import Request, TaskRecord

# What RULER and the key-value papers draw per task and length.
SAMPLES = 500

Build = Callable[[int, random.Random, int], TaskRecord]


def fitted(
    request: Request, name: str, build: Build, least: int, most: int | None = None
) -> Iterator[TaskRecord]:
    """`samples` records of at most `length` tokens, the answer's included.

    `build` makes a record from the size of its haystack, a fresh generator and the sample's
    number. `metadata["tokens"]` is what prompt and answer take. Raises KvfoldError where `length`
    cannot hold a haystack of the `least` size.
    """
    count = request.counter()
    for index in range(SAMPLES if request.samples is None else request.samples):
        seed = f"{request.seed} {name} {request.length} {index}"

        def made(size: int, seed: str = seed, index: int = index) -> TaskRecord:
            return build(size, random.Random(seed), index)

        def taken(size: int) -> int:
            return tokens(made(size), count)

        record = made(largest(taken, request.length, least, most, name))
        metadata = {**record.metadata, "tokens": tokens(record, count), "seed": request.seed}
        yield replace(record, index=index, metadata=metadata)


def tokens(record: TaskRecord, count: Callable[[str], int]) -> int:
    """What prompt and answer take at most, over the questions or over the whole conversation."""
    asked = [count(q.text + q.answer_prefix) + q.max_new_tokens for q in record.questions]
    if record.conversation:
        return count(record.context) + sum(asked)
    # One text, as it is read: pieces may take fewer tokens together.
    whole = [count(record.prompt(q)) + q.max_new_tokens for q in record.questions]
    return max(whole, default=count(record.context))


def number(rng: random.Random, digits: int = 7) -> str:
    """A number that does not start with 0."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def identifier(rng: random.Random) -> str:
    """A random UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
