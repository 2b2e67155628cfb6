# SPDX-License-Identifier: Apache-2.0
"""RULER's variable tracking: a chain of assignments in noise, after one solved example.

Source: NVIDIA/RULER @c3f5e3b, `scripts/data/synthetic/variable_tracking.py` (Hsieh et al., 2024,
arXiv 2404.06654, section 3.2): one chain, four hops. One difference: two line breaks follow the
solved example, where RULER before 2025 and lm-evaluation-harness have four.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator

from kvfold.eval.tasks import ruler
from kvfold.eval.tasks import ruler_wording as wording
from kvfold.eval.tasks.base import Question, SampleRequest, TaskSample
from kvfold.eval.tasks.generated import fitted, largest_haystack

NAMES = 5
LEAST = 5
# Maximal length of the solved example; for short samples, a third of the sample.
EXAMPLE_TOKENS = 500


def _chain(rng: random.Random, letters: int) -> tuple[list[str], str]:
    """Distinct variable names of `letters` letters, and the value of the first."""
    names: dict[str, None] = {}
    while len(names) < NAMES:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names), str(rng.randint(10_000, 99_999))


def _hidden(names: list[str], value: str, size: int, rng: random.Random) -> str:
    """The chain's assignments in order, between `size` repeats of the noise."""
    chain = [f"VAR {names[0]} = {value}"]
    # As in RULER, these end with a blank.
    chain += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    lines = [" ".join(wording.NOISE)] * size
    for place, step in reversed(
        list(zip(sorted(rng.sample(range(size), NAMES)), chain, strict=True))
    ):
        lines.insert(place, step)
    return "\n".join(lines)


def _example(size: int, seed: str, rng: random.Random) -> str:
    """A solved example; positions depend on `seed` only, names and value are drawn from `rng`."""
    names, value = _chain(rng, 3)
    text = wording.as_released(wording.tracking(value, NAMES))
    hidden = _hidden(names, value, size, random.Random(seed))
    answer = f"{text.prefix} {' '.join(names)}"
    return f"{text.intro}\n\n{hidden}\n{text.question}{answer}\n\n"


def _generate(request: SampleRequest) -> Iterator[TaskSample]:
    count, seed = request.counter(), f"{request.seed} example"
    room = min(EXAMPLE_TOKENS, request.length // 3)

    def taken(size: int) -> int:
        return count(_example(size, seed, random.Random(seed)))

    example_size = largest_haystack(taken, room, LEAST, what="the example of variable tracking")

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        example = _example(example_size, seed, rng)
        names, value = _chain(rng, 5)
        text = wording.as_released(wording.tracking(value, NAMES))
        hidden = _hidden(names, value, size, rng)
        limit = ruler.MAX_NEW_TOKENS["vt"]
        question = Question(f"\n{text.question}", tuple(names), limit, text.prefix)
        context = f"{example}{text.intro}\n\n{hidden}"
        return TaskSample("ruler_vt", index, context, (question,), metadata={"haystack": "noise"})

    return fitted(request, "vt", build, LEAST)


TASKS = (ruler.task("vt", "vt", "tracing", "five variables that follow from one value", _generate),)
