# SPDX-License-Identifier: Apache-2.0
"""A needle at every depth, and contexts with many questions."""

import json
import random
import re

import pytest

from kvfold import KvfoldError
from kvfold.eval.tasks import SampleRequest
from kvfold.eval.tasks import needle as needles
from kvfold.eval.tasks.haystack import Haystack
from tests.helpers.tasks import count, made


def test_a_needle_goes_to_every_depth():
    records = made("niah_sandwich", samples=6, depths=3)
    assert [record.metadata["depth"] for record in records] == [0, 50, 100] * 2
    places = [record.context.index(needles.SANDWICH.text) for record in records[:3]]
    size = len(records[0].context)
    assert places[0] < 100 and abs(places[1] / size - 0.5) < 0.1 and places[2] > 0.9 * size - 100
    question = records[0].questions[0]
    assert records[0].stop == ("\n",)
    prompt = records[0].prompt(question)
    assert prompt.startswith("<|im_start|> This is a very long story book: <book> ")
    assert prompt.endswith(
        "</book>.\n Based on the content of the book, Question: What is the best thing to do "
        "in San Francisco?\nAnswer:"
    )


def test_any_needle_can_be_hidden(tmp_path):
    (tmp_path / "story.txt").write_text("It rained. It snowed. " * 200, encoding="utf-8")
    own = needles.Needle("The safe opens with 4711.", "What opens the safe?", ("4711",))
    task = needles.task("safe", "a safe", lambda rng, request: own)
    request = SampleRequest(samples=1, length=600, count=count, haystack=tmp_path)
    record = next(task.samples(request))
    assert " The safe opens with 4711. It" in record.context or own.text in record.context
    assert record.metadata["haystack"] == tmp_path.name
    assert task.score("4711!", record.questions[0]).value == 1
    assert set(task.metrics) == {"keywords", "rouge_1", "rouge_l"}


def test_a_shared_context_has_many_questions():
    alone, together = (made(name, 1, questions=5)[0] for name in ("shared_kv", "conversation_kv"))
    assert len(alone.questions) == len(together.questions) == 5
    assert not alone.conversation and together.conversation
    # A conversation has to fit with all of its turns.
    assert together.metadata["pairs"] < alone.metadata["pairs"]
    pairs = json.loads(alone.context.split("JSON data:\n")[1])
    for question in alone.questions:
        key = re.search('Key: "(.*)"', question.text).group(1)
        assert question.answers == (pairs[key],)


def test_an_empty_haystack_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(KvfoldError, match="is empty"):
        made("niah_sandwich", haystack=tmp_path / "empty.txt")


def test_a_haystack_begins_at_any_sentence_and_wraps_around():
    haystack = Haystack("letters", ["A b.", "C.", "D e f."])
    found = {" ".join(haystack.words(random.Random(seed))) for seed in range(30)}
    assert found == {"A b. C. D e f.", "C. D e f. A b.", "D e f. A b. C."}
