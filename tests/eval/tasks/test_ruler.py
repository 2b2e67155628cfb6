# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks: needles, variables, words and questions among passages; the released files."""

import itertools
import json
import random
import re
from collections import Counter

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.short_ruler import generate
from tests.helpers.tasks import ALL, ESSAYS, HOTPOT, SQUAD, count, made, read


def test_eleven_of_rulers_tasks_are_generated():
    ruler = [task for task in ALL.values() if task.benchmark == "ruler"]
    assert sum(task.generated for task in ruler) == 11
    assert {task.metric for task in ruler} == {"string_match_all", "string_match_part"}
    assert [task.name for task in ruler if task.metric == "string_match_part"] == [
        "ruler_qa_1",
        "ruler_qa_2",
    ]


def test_the_prompt_is_the_benchmarks_byte_for_byte():
    record = made("ruler_niah_single_1", samples=1)[0]
    key = re.search(r"numbers for (\S+) is", record.context).group(1)
    assert record.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nThe grass is green. The sky is blue. "
    )
    assert record.prompt(record.questions[0]).endswith(
        "There and back again.\nWhat is the special magic number for "
        f"{key} mentioned in the provided text? The special magic number for {key} mentioned in "
        "the provided text is"
    )
    assert record.questions[0].max_new_tokens == 128


def test_several_values_or_keys_are_asked_for_in_the_plural():
    record = made("ruler_niah_multiquery", samples=1)[0]
    question = record.questions[0]
    assert record.context.startswith("Some special magic numbers are hidden within")
    assert re.fullmatch(
        r"\nWhat are all the special magic numbers for (\S+), (\S+), (\S+), and (\S+) mentioned in "
        r"the provided text\?",
        question.text,
    )
    assert len(question.answers) == len(set(question.answers)) == 4
    assert question.answer_prefix.endswith("mentioned in the provided text are")
    values = made("ruler_niah_multivalue", samples=1)[0]
    assert len(values.questions[0].answers) == 4


def test_a_needle_among_needles_has_one_right_answer():
    for record in made("ruler_niah_multikey_2", samples=5, length=4000):
        key = re.search(r"number for (\S+) mentioned", record.questions[0].text).group(1)
        assert record.context.count(f" for {key} is: ") == 1


def test_uuids_among_uuids_look_like_rulers_own_file():
    record = made("ruler_niah_multikey_3", samples=1)[0]
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    lines = record.context.split("\n")
    assert lines[0].startswith("A special magic uuid is hidden within the following text.")
    assert all(
        re.fullmatch(f"One of the special magic uuids for {uuid} is: {uuid}\\.", line)
        for line in lines[1:]
    )


def test_essay_tasks_take_essays_where_they_are_given(tmp_path):
    (tmp_path / "b.txt").write_text("Fish swim far. " * 300, encoding="utf-8")
    (tmp_path / "a.txt").write_text("Birds fly high! " * 10, encoding="utf-8")
    for name in ESSAYS:
        noise, essay = (made(f"ruler_{name}", 1, haystack=h)[0] for h in (None, tmp_path))
        assert noise.metadata["haystack"] == "noise instead of essays"
        assert essay.metadata["haystack"] == tmp_path.name
        body = essay.context.split("\n", 1)[1]
        # Needles stand between sentences.
        found = re.findall(r"(.)?(?:^|\s)One of the special magic", body)
        assert found and set(found) <= {".", "!", ""}
        assert "Birds fly high!" in body
    with pytest.raises(KvfoldError, match="no text"):
        made("ruler_niah_single_2", haystack=tmp_path / "absent")


def test_essays_beside_the_data_are_the_haystack(tmp_path):
    (tmp_path / "haystack.txt").write_text("Birds fly high! " * 300, encoding="utf-8")
    for name in ("ruler_niah_single_2", "niah_magic"):
        (record,) = made(name, 1, data=str(tmp_path))
        assert record.metadata["haystack"] == "haystack.txt" and "Birds fly" in record.context


def test_the_chain_of_variables_can_be_followed():
    first, second = made("ruler_vt")
    example, text = first.context.split("\n\nMemorize", 1)
    found = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text))
    chain = list(first.questions[0].answers)
    assert len(chain) == len(set(chain)) == 5
    for before, name in itertools.pairwise(chain):
        assert found[name] == before
    assert f"the value {found[chain[0]]} in the text above" in first.questions[0].text
    # The solved example has names of its own, new in every sample.
    solved = re.search(r"they are:  ((?:[A-Z]{3} ?){5})", example).group(1).split()
    assert all(f"VAR {name} = " in example for name in solved)
    assert not any(f"VAR {name} = " in second.context for name in solved)


def test_variable_tracking_is_misspelled_as_in_the_benchmark():
    (record,) = made("ruler_vt", 1)
    question = record.questions[0]
    value = re.search(r"assigned the value (\d+) in", question.text).group(1)
    # NVIDIA/RULER `scripts/data/synthetic/constants.py`, "assgined" included.
    assert question.answer_prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"5 variables are assgined the value {value}, they are: "
    )
    assert record.prompt(question).count("variables are assgined the value") == 2
    assert "variables are assigned the value" not in record.prompt(question)
    # The bundled model was trained on the right spelling.
    trained = generate("vt", 500, count, random.Random(0)).questions[0]
    assert "5 variables are assigned the value" in trained.prefix


@pytest.mark.parametrize(("length", "repeats"), [(1500, (6, 1)), (6000, (30, 3))])
def test_the_common_words_are_the_most_common(length, repeats):
    record = made("ruler_cwe", 1, length=length)[0]
    listed = record.context.rsplit("\n", 1)[1]
    assert listed.startswith("1. ")
    words = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {word for word, _ in words.most_common(10)} == set(record.questions[0].answers)
    assert set(words.values()) == set(repeats)


def test_the_frequent_words_are_the_most_frequent_but_for_the_dots():
    record = made("ruler_fwe", 1, length=3000)[0]
    ranked = Counter(record.context.split("coded words. ")[1].split()).most_common(5)
    assert ranked[0][0] == "..."
    assert tuple(word for word, _ in ranked[1:4]) == record.questions[0].answers
    assert ranked[3][1] > ranked[4][1]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_words_come_from_a_folder_where_one_is_given(tmp_path, encoding):
    for kind, words in {"adjective": "odd even", "noun": "prime root sum", "verb": "add"}.items():
        (tmp_path / f"{kind}list.txt").write_text("\n".join(words.split()), encoding=encoding)
    record = made("ruler_niah_single_1", 1, words=tmp_path)[0]
    assert re.search(r"numbers for (odd|even)-(prime|root|sum) is", record.context)
    assert "\ufeff" not in record.context
    with pytest.raises(KvfoldError, match="too many"):
        made("ruler_cwe", 1, words=tmp_path)
    (tmp_path / "verblist.txt").unlink()
    with pytest.raises(KvfoldError, match="verblist"):
        made("ruler_cwe", 1, words=tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "data", "encoding"),
    [("qa_1", "squad.json", SQUAD, "utf-8"), ("qa_2", "hotpotqa.json", HOTPOT, "utf-8-sig")],
)
def test_questions_are_asked_among_other_passages(name, file, data, encoding, tmp_path):
    (tmp_path / file).write_text(json.dumps(data), encoding=encoding)
    for where in (tmp_path, tmp_path / file):
        for record in made(f"ruler_{name}", 3, length=700, data=str(where)):
            assert record.metadata["tokens"] <= 700
            assert record.questions[0].answers[0] in record.context
            documents = re.findall(r"Document (\d+):\n", record.context)
            assert documents == [str(n) for n in range(1, len(documents) + 1)]
            assert record.metadata["documents"] == len(documents) > 4
    # All passages fit: there are no more.
    assert made(f"ruler_{name}", 1, length=50_000, data=str(where))[0].metadata["documents"] == 120
    with pytest.raises(KvfoldError, match=file):
        made(f"ruler_{name}")
    (tmp_path / file).write_text("[{}]", encoding="utf-8")
    with pytest.raises(KvfoldError, match="cannot be read as"):
        made(f"ruler_{name}", data=str(tmp_path / file))


def test_rulers_own_files_are_taken_apart_before_the_question(tmp_path):
    for name in ("niah_multikey_3", "niah_multiquery", "vt", "cwe", "fwe"):
        record = made(f"ruler_{name}", 1)[0]
        question = record.questions[0]
        row = {
            "index": 0,
            "input": record.prompt(question),
            "outputs": list(question.answers),
            "length": record.metadata["tokens"],
        }
        # Newer files keep the answer's start apart.
        newer = row | {
            "input": record.context + question.text,
            "answer_prefix": question.answer_prefix,
        }
        for again in read(f"ruler_{name}", [row, newer], tmp_path):
            assert again.context == record.context
            assert again.questions == record.questions
            assert again.metadata["tokens"] == row["length"]
