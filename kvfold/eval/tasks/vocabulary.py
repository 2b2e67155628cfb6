# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of generated tasks: words for keys and lists."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import KvfoldError

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# Parts of needle keys such as "brave-anchor".
ADJECTIVES: tuple[str, ...] = tuple(_WORDS["adjectives"].split())
NOUNS: tuple[str, ...] = tuple(_WORDS["nouns"].split())


@dataclass(frozen=True)
class Vocabulary:
    """Adjectives and nouns, which also form keys, and other words for lists."""

    adjectives: tuple[str, ...] = ADJECTIVES
    nouns: tuple[str, ...] = NOUNS
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path | None) -> Vocabulary:
        """The bundled words, or the word lists of `folder`.

        The folder holds adjectivelist.txt, nounlist.txt and verblist.txt, as wonderwords, which
        RULER uses. Raises KvfoldError if one is missing.
        """
        if folder is None:
            return cls()
        files = [folder / f"{kind}list.txt" for kind in ("adjective", "noun", "verb")]
        for file in files:
            if not file.is_file():
                raise KvfoldError(f"there is no word list {file}")
        lists = [tuple(dict.fromkeys(file.read_text("utf-8-sig").split())) for file in files]
        return cls(*lists)

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """`count` distinct "adjective-noun" keys; raises KvfoldError if there are too few."""
        return self._draw(rng, count, ())

    def words(self, rng: random.Random, count: int) -> list[str]:
        """`count` distinct words, with keys added if there are too few words.

        Raises KvfoldError if there are too few keys as well.
        """
        singles = sorted({*self.adjectives, *self.nouns, *self.others})
        return (
            rng.sample(singles, count) if count <= len(singles) else self._draw(rng, count, singles)
        )

    def _draw(
        self, rng: random.Random, count: int, first: tuple[str, ...] | list[str]
    ) -> list[str]:
        """`count` distinct words: `first`, then random "adjective-noun" keys, shuffled."""
        if count > len(self.adjectives) * len(self.nouns):
            raise KvfoldError(
                f"{count:,} different words are too many: give a folder of longer lists"
            )
        found = dict.fromkeys(first)
        while len(found) < count:
            found[f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"] = None
        drawn = list(found)
        rng.shuffle(drawn)
        return drawn[:count]


BUNDLED = Vocabulary()
