# SPDX-License-Identifier: Apache-2.0
"""Facts about a person: as a list at one place, and spread over a text."""

from __future__ import annotations

import random
import re

import pytest

from kvfold.eval.tasks.base import Question
from kvfold.eval.tasks.profile import FIELDS, FORM, SENTENCES, facts
from kvfold.eval.tasks.ruler_wording import NOISE
from tests.helpers.tasks import ALL, made


def test_facts_are_written_and_asked_for_as_the_wording_says() -> None:
    known = {"home town": "Rome", "pet": "dog"}
    assert FORM.needles(known) == ["\n\nHome town: Rome\nPet: dog\n\n"]
    assert SENTENCES.needles(known) == ["Anna's home town is Rome.", "Anna's pet is dog."]
    assert FORM.ask("home town", "Rome") == Question(
        "\n\nWhat is the home town in the form?", ("Rome",), 16, "Home town:"
    )
    assert SENTENCES.ask("pet", "dog") == Question(
        "\n\nWhat is Anna's pet?", ("dog",), 16, "Anna's pet is"
    )


def test_a_form_stands_at_one_place_and_answers_its_questions() -> None:
    for sample in made("profile_form", 4):
        intro, *noise, form, _ = re.split(r" ?\n\n ?", sample.context)
        assert intro.startswith("A form is hidden") and len(noise) <= 1
        known = dict(line.split(": ") for line in form.splitlines())
        assert set(known) == {field.capitalize() for field in (*FIELDS, "phone number")}
        asked = {q.answer_prefix.removesuffix(":"): q.answers for q in sample.questions}
        assert len(asked) == 8 and not sample.conversation
        assert all(answers == (known[field],) for field, answers in asked.items())


def test_the_facts_of_a_conversation_are_spread_over_the_text() -> None:
    (sample,) = made("profile_conversation", 1)
    said = re.findall(r"Anna's ([\w ]+) is (\w+)\.", sample.context)
    assert sample.conversation and len(said) == len(dict(said)) == 16
    asked = [
        (re.findall("Anna's (.*) is", q.answer_prefix)[0], q.answers[0]) for q in sample.questions
    ]
    assert len(set(asked)) == 8 and set(asked) <= set(said)
    assert sample.metadata["fields"] == [field for field, _ in asked]
    # Noise stands between any two facts.
    assert not re.search(r"Anna's [\w ]+ is \w+\. Anna's", sample.context)


def test_values_are_many_and_do_not_occur_in_the_noise() -> None:
    noise = set(re.findall(r"\w+", " ".join(NOISE).lower()))
    for field, words in FIELDS.items():
        values = words.split()
        assert len(set(values)) == len(values) >= 7, field
        assert not noise & {value.lower() for value in values}
    drawn = [facts(random.Random(seed)) for seed in range(40)]
    assert len({tuple(each) for each in drawn}) == 40
    for field in FIELDS:
        assert len({each[field] for each in drawn}) > 3
    assert all(re.fullmatch("[1-9][0-9]{6}", each["phone number"]) for each in drawn)


@pytest.mark.parametrize(
    ("prediction", "value"), [(" Rome", 1), (" it is ROME.", 1), (" Paris", 0), ("", 0)]
)
def test_an_answer_is_right_if_it_holds_the_value(prediction: str, value: int) -> None:
    for name in ("profile_form", "profile_conversation"):
        assert ALL[name].score(prediction, FORM.ask("home town", "Rome")).value == value
