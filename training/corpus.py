# SPDX-License-Identifier: Apache-2.0
"""Token rows to train on: copying, lookups, needles in RULER's wording, repetition, English text.

A row is (ids, kinds), both [S]; `kinds` gives each token's class in the loss.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.eval import short_ruler
from kvfold.eval.tasks.vocabulary import ADJECTIVES, BUNDLED, NOUNS, Vocabulary

IGNORED, FIRST, ANSWER, TEXT, COPY = range(5)
REPEAT = "\n\nRepeat the previous context exactly."
HELD_OUT = ("frankenstein", "sherlock_holmes", "time_machine")

# Tokens that one question and its answer take, about.
TURN = {"single": 40, "multikey": 40, "multivalue": 60, "multiquery": 85, "vt": 75}
TASK_WEIGHTS = (2, 5, 3, 3, 2)

# Ways to state a fact, from a bare pair to the sentences of the tasks.
FACTS = (
    "{key}:",
    "{key} is:",
    "numbers for {key} is:",
    "One of the special magic numbers for {key} is:",
    "The special magic number for {key} mentioned in the provided text is",
)

Row = tuple[list[int], list[int]]


def read_books(folder: Path | None) -> str:
    """Text of the training novels in `folder`; empty, with a message, if there is none."""
    files = sorted(folder.glob("*.txt")) if folder and folder.is_dir() else []
    files = [file for file in files if not file.name.startswith(HELD_OUT)]
    if not files:
        print(f"no books at {folder}: training continues without English text", flush=True)
    return "\n\n".join(
        re.sub(r"(?<!\n)\n(?!\n)", " ", file.read_text(encoding="utf-8")) for file in files
    )


def open_words(text: str, count: int = 8000) -> Vocabulary:
    """Keys of any words: the commonest of `text`, and as many that no text has."""
    rng = random.Random(0)
    found = Counter(re.findall(r"\b[a-z]{3,10}\b", text))
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
    invented = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(count)]
    words = tuple(dict.fromkeys([word for word, _ in found.most_common(count)] + invented))
    return Vocabulary(words, words)


def random_rows(kind: str, batch: int, length: int, vocabulary: int, special: int) -> list[Row]:
    """Copies or key-value lookups over random tokens, a fresh alphabet in every row."""
    make = _copy if kind == "copy" else _lookup
    return [make(length, vocabulary, special) for _ in range(batch)]


def _copy(length: int, vocabulary: int, special: int) -> Row:
    """Noise in which one segment returns after a random gap."""
    size = random.randint(6, length // 3)
    alphabet = random.sample(range(special, vocabulary), random.choice((24, 48)))
    ids = [1, *random.choices(alphabet, k=length - 1)]
    first = random.randint(1, 3)
    again = random.randint(first + size, length - size)
    ids[again : again + size] = ids[first : first + size]
    kinds = [IGNORED] * length
    kinds[again + 1 : again + size] = [COPY] * (size - 1)
    return ids, kinds


def _lookup(length: int, vocabulary: int, special: int) -> Row:
    """Pairs of one-token keys and values, then the keys again, drawn with replacement."""
    pairs = random.choice((4, 6, 8))
    tokens = random.sample(range(special, vocabulary), 2 * pairs)
    table = list(zip(tokens[:pairs], tokens[pairs:], strict=True))
    asked = random.choices(table, k=(length - 1) // 2 - pairs)
    ids = [1, *(token for pair in table + asked for token in pair)]
    kinds = [IGNORED] * (1 + 2 * pairs) + [IGNORED, FIRST] * len(asked)
    return _fit((ids, kinds), length)


def _fit(row: Row, length: int) -> Row:
    ids, kinds = row
    missing = length - len(ids)
    return (ids + [0] * missing)[:length], (kinds + [IGNORED] * missing)[:length]


@dataclass(frozen=True)
class Writer:
    """Writes documents, questions and answers as token rows."""

    tokenizer: PreTrainedTokenizerBase
    text: str
    open_words: Vocabulary = BUNDLED

    def count(self, text: str) -> int:
        return len(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def facts(self, length: int, forms: int) -> Row:
        """Short facts, then the same facts asked for again: the step from lookups to wording."""
        statement = random.choice(FACTS[:forms])
        again = random.choice((statement, statement, *FACTS[:forms]))
        only_noun = forms == 1 or random.random() < 0.3
        nouns = random.sample(NOUNS, random.randint(3, 6))
        keys = [noun if only_noun else f"{random.choice(ADJECTIVES)}-{noun}" for noun in nouns]
        digits = random.choice((2, 4, 7))
        values = {key: str(random.randint(10 ** (digits - 1), 10**digits - 1)) for key in keys}
        parts = [("<|bos|>", IGNORED)]
        parts += [(f" {statement.format(key=key)} {values[key]}.", IGNORED) for key in keys]
        for _ in range(length // 8):
            key = random.choice(keys)
            parts.append((f" {again.format(key=key)}", IGNORED))
            parts += [(" " + values[key][:2], FIRST), (values[key][2:] + ".", ANSWER)]
        return self._render(parts, length)

    def needles(
        self, length: int, weights: tuple[int, ...] = TASK_WEIGHTS, unlisted: float = 0.0
    ) -> Row:
        """A document with needles, and questions about it until the row is full.

        The part `unlisted` of the rows has keys of open words instead of listed ones.
        """
        tasks, weights = (TURN, weights) if length >= 256 else (("multikey",), (1,))
        task = random.choices(list(tasks), weights)[0]
        keys = {
            "multikey": random.randint(2, min(8, length // 48)),
            "multiquery": random.randint(4, 6),
        }
        statements = task in ("single", "multikey") and random.random() < (
            0.5 if length < 256 else 0.1
        )
        turn = 20 if statements else TURN[task]
        # Half of the rows spend half their length on questions: each is one more lookup.
        share = random.choice((0.5, 0.15))
        asked = 1 if task == "vt" else max(1, int(length * share) // turn)
        needles = {"single": 1, "multikey": keys["multikey"], "vt": 5}.get(task, 6)
        sample = short_ruler.generate(
            task,
            max(length - asked * turn, 40 + 24 * needles),
            self.count,
            random.Random(random.getrandbits(64)),
            keys=keys.get(task),
            questions=asked + 1,
            haystack=self._haystack() if random.random() < 0.3 else short_ruler.NOISE,
            vocabulary=self.open_words if random.random() < unlisted else BUNDLED,
        )
        return self._render(self._dialogue(sample, statements), length)

    def _haystack(self) -> list[str]:
        if not self.text:
            return list(short_ruler.NOISE)
        start = random.randrange(max(1, len(self.text) - 20_000))
        return re.split(r"(?<=[.!?])\s+", self.text[start : start + 20_000])[1:-1] or list(
            short_ruler.NOISE
        )

    def _dialogue(
        self, sample: short_ruler.NeedleDocument, statements: bool
    ) -> list[tuple[str, int]]:
        parts = [("<|bos|><|user|>" + sample.document, IGNORED)]
        for turn, question in enumerate(sample.questions):
            if statements:
                key = question.prefix.split(" for ")[1].split()[0]
                parts.append((f" One of the special magic numbers for {key} is:", IGNORED))
            else:
                opening = random.choice(("\n", "\n\n")) if turn == 0 else "<|user|>"
                parts.append((f"{opening}{question.text}<|end|><|assistant|>", IGNORED))
                # The key, between the wording's own words, is copied from the question.
                split = re.split(r"(\w+-\w+)", question.prefix)
                parts += [(piece, ANSWER if i % 2 else TEXT) for i, piece in enumerate(split)]
            for i, answer in enumerate(question.answers):
                head = 2 if answer.isdigit() else 1
                parts += [(",", ANSWER)] if i else []
                parts += [(" " + answer[:head], FIRST), (answer[head:], ANSWER)]
            parts.append((".", ANSWER))
            if not statements:
                parts.append(("<|end|>", ANSWER))
        return parts

    def repetition(self, length: int) -> Row:
        """KVzip's prompt: the context, the request to repeat it, the context again."""
        sample = short_ruler.generate(
            "multikey",
            (length - 24) // 2,
            self.count,
            random.Random(random.getrandbits(64)),
            keys=random.randint(1, max(1, min(6, length // 80))),
            haystack=self._haystack() if random.random() < 0.6 else short_ruler.NOISE,
        )
        document = sample.document
        parts = [
            ("<|bos|><|user|>" + document, IGNORED),
            (REPEAT + "<|end|><|assistant|>", IGNORED),
            (document, COPY),
            ("<|end|>", ANSWER),
        ]
        return self._render(parts, length)

    def prose(self, length: int) -> Row:
        """English text, every token predicted."""
        if not self.text:
            return self.repetition(length)
        start = random.randrange(max(1, len(self.text) - 6 * length))
        return self._render(
            [("<|bos|>", IGNORED), (self.text[start : start + 6 * length], TEXT)], length
        )

    def _render(self, parts: list[tuple[str, int]], length: int) -> Row:
        kinds_of_characters = [kind for text, kind in parts for _ in text]
        encoding = self.tokenizer.backend_tokenizer.encode(
            "".join(text for text, _ in parts), add_special_tokens=False
        )
        kinds = [kinds_of_characters[start] for start, _ in encoding.offsets]
        return _fit((encoding.ids, kinds), length)


def stack(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows → ids and kinds, both [B, S]."""
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
