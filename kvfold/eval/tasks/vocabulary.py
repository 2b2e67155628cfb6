# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of generated tasks: words for keys and lists."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from kvfold.errors import KvfoldError

# ruff: noqa: SIM905

# Parts of needle keys such as "brave-anchor".
ADJECTIVES: tuple[str, ...] = tuple(
    """
    able bold brave brief bright broad calm clean clear clever cold cool crisp curly dark deep
    dry eager early easy empty even faint fair fancy fast final fine firm first flat fresh full
    funny gentle giant glad golden good grand great green happy hard heavy high honest hot huge
    idle jolly keen kind large late lazy light little lively long loose loud lucky merry mild
    modern narrow neat new nice noble old open pale plain polite proud pure quick quiet rapid
    rare ready rich ripe rough round royal safe sharp shiny short shy silent silver simple slow
    small smart smooth soft solid
    """.split()
)

NOUNS: tuple[str, ...] = tuple(
    """
    anchor apple arrow badge baker banjo barn basin basket beach beard bell bench berry bird
    blade blanket board boat bone book boot bottle bow bowl box branch brass bread brick bridge
    broom brush bucket button cabin cable camel camp candle canoe card carpet castle cat cave
    chain chair chalk cheese cherry chest circle clock cloud coach coal coast coin collar comet
    copper corn cotton cousin crab cradle crane crown cup curtain dancer deer desk diamond dish
    doctor dog door dove dragon dress drum duck eagle ear engine fan farm feather fence fiddle
    field finger fish flag flame flower flute forest fork fox frame frog fruit garden gate ghost
    glass glove goat goose grape guitar hammer harbor harp hat hawk helmet hen hill honey hook
    horn horse house island jacket jar jewel judge kettle key king kite knife knot ladder lake
    lamp leaf lemon letter lion lock magnet maple marble market mask meadow medal melon mirror
    monkey moon mountain mouse needle nest nurse oak ocean onion orange orchard oven owl paddle
    painter palace panda paper parrot peach pearl pencil pepper piano pilot pine pipe planet
    plate plum pocket pond poet potato prince puzzle queen rabbit radio
    """.split()
)


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
