# SPDX-License-Identifier: Apache-2.0
"""Facts about one person, easy enough for models of 0.1 B parameters.

Such models confuse keys that are alike (UUIDs, names), so every key is another field of a profile,
such as "home town". Values are random and follow from no other knowledge. They are hidden in the
haystack, by default RULER's noise.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfold.eval.metrics.ruler import string_match_part
from kvfold.eval.tasks.base import Question, SampleRequest, Task, TaskSample, by_answers
from kvfold.eval.tasks.generated import fitted, number
from kvfold.eval.tasks.haystack import Haystack
from kvfold.eval.tasks.ruler_niah import in_essay

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# Fields of a profile and their values.
FIELDS: dict[str, str] = _TEXTS["fields"]

QUESTIONS = 8
# A phone number takes at most 7 tokens, one per digit.
MAX_NEW_TOKENS = 16
LEAST_WORDS = 20


@dataclass(frozen=True)
class ProfileWording:
    """Templates of `{field}` (`{Field}` with a capital) and `{value}`, and how facts stand.

    `together`: true if the facts form a list at one place of the text, else each has its own place.
    """

    intro: str
    fact: str
    question: str
    prefix: str
    together: bool

    def needles(self, facts: dict[str, str]) -> list[str]:
        """Texts to hide: one list of the facts, or each fact."""
        every = [_filled(self.fact, field, value) for field, value in facts.items()]
        return ["\n\n" + "\n".join(every) + "\n\n"] if self.together else every

    def ask(self, field: str, value: str) -> Question:
        """The question for a field."""
        text, prefix = _filled(self.question, field), _filled(self.prefix, field)
        return Question(f"\n\n{text}", (value,), MAX_NEW_TOKENS, prefix)


def _filled(template: str, field: str, value: str = "") -> str:
    return template.format(field=field, Field=field.capitalize(), value=value)


def facts(rng: random.Random) -> dict[str, str]:
    """A random value for every field, in random order."""
    drawn = {field: rng.choice(values.split()) for field, values in FIELDS.items()}
    drawn["phone number"] = number(rng)
    return dict(rng.sample(list(drawn.items()), len(drawn)))


def _generate(
    name: str, wording: ProfileWording, conversation: bool, request: SampleRequest
) -> Iterator[TaskSample]:
    """Samples of one person each, with questions for `QUESTIONS` of the fields."""
    haystack = Haystack.of(request)

    def build(size: int, rng: random.Random, index: int) -> TaskSample:
        known = facts(rng)
        asked = rng.sample(list(known), QUESTIONS)
        hidden = in_essay(haystack.words(rng), size, wording.needles(known), rng)
        return TaskSample(
            name,
            index,
            f"{wording.intro}\n\n{hidden}",
            tuple(wording.ask(field, known[field]) for field in asked),
            stop=("\n",),
            conversation=conversation,
            metadata={"fields": asked, "haystack": haystack.name},
        )

    return fitted(request, name, build, LEAST_WORDS)


def _task(name: str, summary: str, group: str, wording: ProfileWording, conversation: bool) -> Task:
    return Task(
        name,
        summary,
        "kvfold",
        "profile",
        group,
        partial(_generate, name, wording, conversation),
        {"substring": by_answers(string_match_part)},
        generated=True,
    )


FORM = ProfileWording(**_TEXTS["form"])
SENTENCES = ProfileWording(**_TEXTS["sentences"])

TASKS = (
    _task(
        "profile_form", "fields of one form, each asked on its own", "shared context", FORM, False
    ),
    _task(
        "profile_conversation",
        "eight turns about facts spread over a text",
        "multi-turn",
        SENTENCES,
        True,
    ),
)
