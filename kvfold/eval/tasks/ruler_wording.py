# SPDX-License-Identifier: Apache-2.0
"""RULER's wording: introductions, questions, and answer prefixes.

Source: NVIDIA/RULER @c3f5e3b, `scripts/data/synthetic/constants.py` and, for the singular,
`scripts/data/synthetic/niah.py` (Hsieh et al., 2024, arXiv 2404.06654).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
NOISE: tuple[str, ...] = tuple(_TEXTS["noise"])

# Name of the haystack of an essay task without essays.
NO_ESSAYS = "noise instead of essays"


class Wording(NamedTuple):
    """Texts around a context: `intro`, then the context, `question`, and the answer's `prefix`."""

    intro: str
    question: str
    prefix: str


def needle(kind: str, key: str, value: str) -> str:
    """A needle: the sentence that states a key's value; `kind` is "numbers" or "uuids"."""
    return f"One of the special magic {kind} for {key} is: {value}."


def needles(kind: str, keys: Sequence[str], several: bool) -> Wording:
    """Wording of the needle tasks for `keys`; singular unless `several` values are asked for."""
    what, be, some = (kind, "are", "Some") if several else (kind.removesuffix("s"), "is", "A")
    ask = "What are all" if several else "What is"
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    return Wording(
        f"{some} special magic {what} {be} hidden within the following text. "
        f"Make sure to memorize it. I will quiz you about the {what} afterwards.",
        f"{ask} the special magic {what} for {query} mentioned in the provided text?",
        f" The special magic {what} for {query} mentioned in the provided text {be}",
    )


def tracking(value: str, names: int) -> Wording:
    """Wording of variable tracking, for a chain of `names` variables that starts with `value`.

    Spelled right, as in the bundled model's training; see `as_released`.
    """
    return Wording(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.",
        f"Question: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{names} variables are assigned the value {value}, they are: ",
    )


def as_released(text: Wording) -> Wording:
    """The wording of variable tracking with RULER's misspelling in the answer's prefix."""
    return text._replace(prefix=text.prefix.replace("assigned", "assgined"))


COMMON, FREQUENT, DOCUMENTS = (
    Wording(**_TEXTS[name]) for name in ("common", "frequent", "documents")
)
