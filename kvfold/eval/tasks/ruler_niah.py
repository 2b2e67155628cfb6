# SPDX-License-Identifier: Apache-2.0
"""RULER's eight needle tasks: keys, values and queries in noise, in essays or among needles.

Source: NVIDIA/RULER @c3f5e3b, `scripts/data/synthetic/niah.py` and `scripts/synthetic.yaml`
(Hsieh et al., 2024, arXiv 2404.06654, section 3.1). Two differences: sentences are split by a
regular expression instead of nltk's punkt, which needs a download; and without essays the essay
tasks use the noise. `metadata["haystack"]` names the text.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvfold.eval.tasks import ruler, source
from kvfold.eval.tasks import ruler_wording as wording
from kvfold.eval.tasks.base import Question, SampleRequest, TaskSample
from kvfold.eval.tasks.generated import fitted, identifier, number
from kvfold.eval.tasks.vocabulary import Vocabulary

ENDS = '".", "!" or "?" and a space'  # of the sentences that `split` tells apart
# RULER: 40 points from 0 to 100 %.
DEPTHS = [round(100 * point / 39) for point in range(40)]
# Smallest haystacks: repeats of the noise, needles, words of essays.
LEAST = {"noise": 5, "needle": 5, "essay": 50}


class Essay(NamedTuple):
    """Name and words of a haystack of essays."""

    name: str
    words: list[str]

    @classmethod
    def of(cls, path: Path) -> Essay:
        """The essays at `path`; raises KvfoldError if there are none, or none with sentences."""
        text = source.text(path)
        source.refuse_without_sentences(path, split(text), ENDS)
        return cls(source.name_of(path), text.split())


@dataclass(frozen=True)
class NeedleTask:
    """Parameters of a needle task.

    Number of keys, of values per key, and of keys asked for; kinds of keys and values; haystack.
    """

    haystack: str = "noise"
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"

    def build(
        self,
        task: str,
        essay: Essay | None,
        vocabulary: Vocabulary,
        size: int,
        rng: random.Random,
        index: int,
    ) -> TaskSample:
        """A sample with a haystack of `size` repeats of the noise, needles, or essay words."""
        keys = self._keys(rng, vocabulary, max(self.keys, self.queries))
        values = {key: [self._value(rng) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        if self.haystack == "essay":
            words = essay.words if essay else " ".join(wording.NOISE).split()
            hidden = in_essay(words, size, needles, rng)
        else:
            hidden = self._in_lines(size, needles, keys, vocabulary, rng)
        several = self.queries * self.values > 1
        intro, question, prefix = wording.needles(self.value_kind, asked, several)
        answers = tuple(value for key in asked for value in values[key])
        limit = ruler.MAX_NEW_TOKENS["niah"]
        essays = essay.name if essay else wording.NO_ESSAYS
        used = {"essay": essays, "needle": "needles"}.get(self.haystack, self.haystack)
        return TaskSample(
            task,
            index,
            f"{intro}\n{hidden}",
            (Question(f"\n{question}", answers, limit, prefix),),
            metadata={"haystack": used},
        )

    def _in_lines(
        self,
        size: int,
        needles: list[str],
        keys: list[str],
        vocabulary: Vocabulary,
        rng: random.Random,
    ) -> str:
        """Needles at random lines among `size` lines of noise, or of distractor needles."""
        lines = [" ".join(wording.NOISE)] * size
        if self.haystack == "needle":
            # Distractors must not share a key with the needles: there would be two right answers.
            others = [k for k in self._keys(rng, vocabulary, size + len(keys)) if k not in keys]
            lines = [self._needle(key, self._value(rng)) for key in others[:size]]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _keys(self, rng: random.Random, vocabulary: Vocabulary, count: int) -> list[str]:
        if self.key_kind == "uuids":
            return [identifier(rng) for _ in range(count)]
        return vocabulary.keys(rng, count)

    def _value(self, rng: random.Random) -> str:
        return identifier(rng) if self.value_kind == "uuids" else number(rng)

    def _needle(self, key: str, value: str) -> str:
        return wording.needle(self.value_kind, key, value)


def in_essay(words: Sequence[str], size: int, needles: list[str], rng: random.Random) -> str:
    """The first `size` words, repeated if too few, with needles between sentences."""
    sentences = split(" ".join(itertools.islice(itertools.cycle(words), size)))
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    places = [len(sentences) * depth // 100 for depth in depths]
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    return " ".join(sentences)


def split(text: str) -> list[str]:
    """Sentences, split at white space after ".", "!" or "?"."""
    return re.split(r"(?<=[.!?])\s+", text.strip())


def _generate(name: str, needles: NeedleTask, request: SampleRequest) -> Iterator[TaskSample]:
    path = source.haystack(request)
    essay = Essay.of(path) if path and needles.haystack == "essay" else None
    build = partial(needles.build, f"ruler_{name}", essay, Vocabulary.of(request.words))
    return fitted(request, name, build, LEAST[needles.haystack])


_TASKS = {
    "niah_single_1": ("one number in noise", NeedleTask()),
    "niah_single_2": ("one number in essays", NeedleTask("essay")),
    "niah_single_3": ("one UUID in essays", NeedleTask("essay", value_kind="uuids")),
    "niah_multikey_1": ("one of four keys, in essays", NeedleTask("essay", keys=4)),
    "niah_multikey_2": ("one needle among needles", NeedleTask("needle")),
    "niah_multikey_3": (
        "one UUID among UUIDs",
        NeedleTask("needle", key_kind="uuids", value_kind="uuids"),
    ),
    "niah_multivalue": ("four values of one key, in essays", NeedleTask("essay", values=4)),
    "niah_multiquery": ("four keys at once, in essays", NeedleTask("essay", queries=4)),
}

TASKS = tuple(
    ruler.task(
        name,
        "niah",
        "single needle" if "single" in name else "many needles",
        summary,
        partial(_generate, name, needles),
    )
    for name, (summary, needles) in _TASKS.items()
)
