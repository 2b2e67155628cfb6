# SPDX-License-Identifier: Apache-2.0
"""Needles in many languages: text, needle, question and the answer's first words are in one.

The haystack of `needle_de` is de.txt in the folder `haystack`, or the file given as such; RULER's
noise in German otherwise. A language is a table of languages.toml.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.eval.metrics.needle import first_number
from kvfold.eval.tasks import ruler_wording, source
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers
from kvfold.eval.tasks.generated import fitted, number
from kvfold.eval.tasks.needle import depth

DIGITS = 5
MAX_NEW_TOKENS = 16
# Once the noise.
LEAST_SENTENCES = 5
# Chinese and Japanese write no space after a sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")


@dataclass(frozen=True)
class LanguageWording:
    """Texts of one language; `needle`, `question` and `prefix` are templates of `{name}`.

    The needle also has `{number}`. `between` separates sentences.
    """

    language: str
    names: list[str]
    intro: str
    needle: str
    question: str
    prefix: str
    noise: list[str]
    between: str = " "

    def ask(self, name: str, value: str) -> Question:
        """The question about the number of `name`."""
        text, prefix = self.question.format(name=name), self.prefix.format(name=name)
        return Question(f"\n\n{text}", (value,), MAX_NEW_TOKENS, prefix)


LANGUAGES = {
    code: LanguageWording(**texts)
    for code, texts in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}


def text_of(code: str, request: SampleRequest) -> tuple[str, list[str]]:
    """Name and sentences of a language's haystack.

    Raises KvfoldError if the folder of haystacks has none in this language, or it cannot be read,
    has no sentences, or is shorter than a sample: RULER repeats a short text, which is easier to
    compress.
    """
    path = source.haystack(request)
    if path is None:
        return ruler_wording.NO_ESSAYS, LANGUAGES[code].noise
    if path.is_dir():
        path = path / f"{code}.txt"
    if not path.is_file():
        language = LANGUAGES[code].language
        raise KvfoldError(f"needle_{code} hides its needle in {language}: there is no file {path}")
    text = source.text(path)
    if (tokens := request.counter()(text)) < request.length:
        raise KvfoldError(
            f"{path} has {tokens} tokens, fewer than a sample of {request.length}: give a longer "
            "text, or a shorter length"
        )
    every = sentences(text)
    source.refuse_without_sentences(path, every, '".", "!", "?" or "。"')
    return path.name, every


def sentences(text: str) -> list[str]:
    """Sentences of a text in any of the languages, each on one line."""
    return [" ".join(one.split()) for one in _SENTENCE_END.split(text) if one.strip()]


def _generate(code: str, request: SampleRequest) -> Iterator[TaskSample]:
    """Samples at every depth, in a text that begins at a random sentence."""
    wording = LANGUAGES[code]
    haystack, every = text_of(code, request)

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        name, value = rng.choice(wording.names), number(rng, DIGITS)
        start, percent = rng.randrange(len(every)), depth(index, request.depths)
        hidden = list(itertools.islice(itertools.cycle(every), start, start + size))
        needle = wording.needle.format(name=name, number=value)
        hidden.insert(int(size * percent / 100), needle)
        return TaskSample(
            f"needle_{code}",
            index,
            f"{wording.intro}\n\n{wording.between.join(hidden)}",
            (wording.ask(name, value),),
            stop=("\n",),
            metadata={"depth": percent, "language": wording.language, "haystack": haystack},
        )

    return fitted(request, f"needle_{code}", build, LEAST_SENTENCES)


TASKS = tuple(
    Task(
        f"needle_{code}",
        f"a number in a text in {wording.language}",
        "kvfold",
        "languages",
        "languages",
        partial(_generate, code),
        {"first_number": by_answers(first_number)},
        generated=True,
    )
    for code, wording in LANGUAGES.items()
)
