# SPDX-License-Identifier: Apache-2.0
"""Words of a text in any script, for overlaps between texts of users.

Texts in ASCII give the words of package rouge-score without stemming, which knows no others: to it
a Chinese text has no words, and two Russian ones share at most their numbers.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

# Scripts that write no spaces between words: Thai, Lao, Myanmar, Khmer, kana, Han.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)
_ZERO_WIDTH_SPACE = "\u200b"
# Arabic separators of thousands and of decimals.
_SEPARATORS = {"\u066c": ",", "\u066b": "."}


def words(text: str) -> list[str]:
    """Words of letters and digits, case folded; single characters where no spaces are written.

    Combining marks belong to their letter, composed or not; other invisible characters, such as
    soft hyphens and joiners, are left out.
    """
    found: list[str] = []
    joins = takes_marks = False
    for character in folded(text):
        kind = unicodedata.category(character)
        if kind == "Cf" and character != _ZERO_WIDTH_SPACE:
            continue
        if kind[0] == "M":
            if takes_marks:
                found[-1] += character
            continue
        takes_marks = kind[0] in "LN"
        alone = kind[0] == "L" and bool(_UNSPACED.match(character))
        if takes_marks and joins and not alone:
            found[-1] += character
        elif takes_marks:
            found.append(character)
        joins = takes_marks and not alone
    return found


def marks(text: str) -> list[str]:
    """Visible characters, for a text that has no words."""
    return list("".join(folded(text).split()))


def spaced(text: str) -> str:
    """The text with spaces where a script writes none: each of its characters is a word."""
    parts = (words(word) if _UNSPACED.search(word) else [word] for word in text.split())
    return " ".join(itertools.chain.from_iterable(parts))


def without_punctuation(text: str) -> str:
    """The folded text without punctuation beyond ASCII, which SQuAD's metrics do not know."""
    kept = (each for each in folded(text) if each.isascii() or unicodedata.category(each)[0] != "P")
    return "".join(kept)


def folded(text: str) -> str:
    """The text without differences of case, composed letters, wide forms and scripts of digits."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return ascii_digits(folded)


def ascii_digits(text: str) -> str:
    """The text with decimal digits of any script as 0 to 9, and Arabic separators as , and ."""
    if text.isascii():
        return text
    return "".join(_ascii_digit(each) for each in text)


def _ascii_digit(character: str) -> str:
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return _SEPARATORS.get(character, character)
