# SPDX-License-Identifier: Apache-2.0
"""Texts that generated tasks hide their needles in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfold.eval.tasks import ruler_wording, source
from kvfold.eval.tasks.base import SampleRequest
from kvfold.eval.tasks.ruler_niah import ENDS, split


@dataclass(frozen=True)
class Haystack:
    """A text by name, as sentences."""

    name: str
    sentences: Sequence[str]

    @classmethod
    def of(cls, request: SampleRequest) -> Haystack:
        """The haystack of a request, RULER's noise by default.

        Raises KvfoldError if it cannot be read, or has no sentences to hide needles between.
        """
        path = source.haystack(request)
        if path is None:
            return cls(ruler_wording.NO_ESSAYS, split(" ".join(ruler_wording.NOISE)))
        sentences = split(source.text(path))
        source.refuse_without_sentences(path, sentences, ENDS)
        return cls(source.name_of(path), sentences)

    def words(self, rng: random.Random) -> list[str]:
        """All words from a random sentence on; the sentences before it follow at the end."""
        start = rng.randrange(len(self.sentences))
        return " ".join([*self.sentences[start:], *self.sentences[:start]]).split()

    def hiding(self, needles: Mapping[str, float], size: int, rng: random.Random) -> str:
        """`size` words from a random sentence on, repeated if too few, and needles between them.

        `needles` have depths in percent: each goes after the last sentence that ends before its
        depth.
        """
        sentences = split(" ".join(itertools.islice(itertools.cycle(self.words(rng)), size)))
        for needle, depth in sorted(needles.items(), key=lambda item: -item[1]):
            sentences.insert(int(len(sentences) * depth / 100), needle)
        return " ".join(sentences)
