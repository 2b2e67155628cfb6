# SPDX-License-Identifier: Apache-2.0
"""Passages to fit a scorer on: pieces of the user's texts, and records that texts rarely hold.

A scorer that has met novels alone drops identifiers and numbers. Half of the passages therefore
carry generated records: statements with codes and numbers among the text's own sentences, tables,
logs, settings and program code.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from collections.abc import Sequence

from kvfold.errors import KvfoldError

FIRST = [
    "Marta", "Jonas", "Aiko", "Pedro", "Leila", "Sven", "Noor", "Carla", "Tomasz", "Ingrid",
    "Kofi", "Yara", "Dmitri", "Helen",
]  # fmt: skip
LAST = [
    "Lund", "Okafor", "Reyes", "Tanaka", "Novak", "Berg", "Haddad", "Silva", "Meyer", "Quist",
    "Ilves", "Marsh", "Duarte",
]  # fmt: skip
PLACES = [
    "Bergen", "Lagos", "Porto", "Kyoto", "Tartu", "Quito", "Galway", "Izmir", "Malmo", "Oran",
    "Cusco", "Turku",
]  # fmt: skip
THINGS = [
    "invoice", "locker", "ticket", "parcel", "passport", "account", "sensor", "router", "badge",
    "claim", "order",
]  # fmt: skip
WORD = re.compile(r"\S+\s*")
ENDING = re.compile(r"(?<=[.!?])\s+")


def drawn(texts: Sequence[str], count: int, words: int, seed: int) -> list[str]:
    """`count` passages of about `words` words, in turn from each of `texts`, in random order.

    Passages of one text may overlap. Half of them carry generated records, of each text every other
    one. Texts of `too_short` and `without_passage` give none. Raises KvfoldError if all are too
    short.
    """
    draw = random.Random(seed)
    pool = [split for text in texts if len(split := _words(text)) >= words]
    if not pool:
        raise KvfoldError(
            f"the texts are too short to fit a scorer: none has {words} words, as a passage has"
        )
    made = []
    for number in range(count):
        turn, place = divmod(number, len(pool))
        source = pool[place]
        at = draw.randrange(len(source) - words + 1)
        passage = "".join(source[at : at + words]).rstrip()
        # A text that carries records in one turn has none in the next.
        made.append(_with_records(passage, draw) if (turn + place) % 2 else passage)
    draw.shuffle(made)  # so that what is held out is of both kinds
    return made


def too_short(texts: Sequence[str], words: int) -> list[int]:
    """Places of the texts that have fewer than `words` words, as no passage has."""
    return [place for place, text in enumerate(texts) if len(_words(text)) < words]


def without_passage(texts: Sequence[str], count: int, words: int) -> list[int]:
    """Places of the texts that are long enough, and yet none of `count` passages is drawn from."""
    short = {*too_short(texts, words)}
    return [place for place in range(len(texts)) if place not in short][count:]


def _words(text: str) -> list[str]:
    """The text's words, each with the white space behind it: indented lines and tables stay."""
    return WORD.findall(text)


def _with_records(passage: str, draw: random.Random) -> str:
    """A passage with statements among its sentences, or with a block of records in its middle."""
    sentences = ENDING.split(passage)
    if draw.random() < 0.6:
        for _ in range(draw.randint(3, 12)):
            sentences.insert(draw.randrange(len(sentences) + 1), _statement(draw))
        return " ".join(sentences)
    block = draw.choice([_table, _log, _settings, _code, _notes])(draw)
    middle = len(sentences) // 2
    half = max(1, len(sentences) * draw.randint(1, 3) // 8)
    around = sentences[middle - half : middle], sentences[middle : middle + half]
    return f"{' '.join(around[0])}\n\n{block}\n\n{' '.join(around[1])}"


# --- values and statements ------------------------------------------------------------------


def _name(draw: random.Random) -> str:
    return f"{draw.choice(FIRST)} {draw.choice(LAST)}"


def _digits(draw: random.Random) -> str:
    return str(draw.randrange(10 ** draw.randint(2, 8)))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _code_word(draw: random.Random) -> str:
    letters = "".join(draw.choices(string.ascii_uppercase, k=draw.randint(2, 4)))
    return f"{letters}-{draw.randrange(10000):04}"


def _date(draw: random.Random) -> str:
    return f"{draw.randint(1950, 2030)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"


def _amount(draw: random.Random) -> str:
    return f"{draw.randrange(100000) / 100:,.2f}"


VALUES = (_digits, _digits, _uuid, _uuid, _code_word, _date, _amount)


def _value(draw: random.Random) -> str:
    return draw.choice(VALUES)(draw)


def _statement(draw: random.Random) -> str:
    """A sentence that states a value, such as "The locker of Aiko Berg is 48213."."""
    thing, value = draw.choice(THINGS), _value(draw)
    return draw.choice(
        [
            f"The {thing} of {_name(draw)} is {value}.",
            f"Remember that the {thing} in {draw.choice(PLACES)} is registered as {value}.",
            f"{_name(draw)} moved to {draw.choice(PLACES)} on {_date(draw)}.",
            f"For the {thing} named {_code_word(draw).lower()}, the value to use is: {value}.",
            f"{_name(draw)}, born {_date(draw)}, can be reached at {_digits(draw)}.",
        ]
    )


# --- blocks ---------------------------------------------------------------------------------


def _table(draw: random.Random) -> str:
    rows = [f"{_name(draw)},{_date(draw)},{_digits(draw)},{_amount(draw)}" for _ in range(25)]
    return "\n".join(["name,date,number,amount", *rows])


def _log(draw: random.Random) -> str:
    return "\n".join(
        f"{_date(draw)} {draw.choice(['INFO', 'WARN', 'ERROR'])} {draw.choice(THINGS)} "
        f"{_uuid(draw)} took {draw.randrange(9000)} ms"
        for _ in range(14)
    )


def _settings(draw: random.Random) -> str:
    lines = [f'  "{draw.choice(THINGS)}_{n}": "{_value(draw)}"' for n in range(22)]
    return "{\n" + ",\n".join(lines) + "\n}"


def _code(draw: random.Random) -> str:
    parts = []
    for number in range(7):
        thing, limit = draw.choice(THINGS), _digits(draw)
        parts.append(
            f"def check_{thing}_{number}(value, limit={limit}):\n"
            f'    """Return the {thing} if it is below the limit."""\n'
            f"    if value > limit:\n"
            f'        raise ValueError("{thing} {_code_word(draw)}")\n'
            f"    return value * {draw.randrange(1, 90)}\n"
        )
    return "\n".join(parts)


def _notes(draw: random.Random) -> str:
    return "\n".join(f"- {_statement(draw)}" for _ in range(22))
