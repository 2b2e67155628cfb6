# SPDX-License-Identifier: Apache-2.0
"""Rows of LooGLE, InfiniteBench, SCBench, GSM8K, MATH-500 and MT-Bench, as they are published."""

import json

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.tasks import TaskSample, UnreadableSample
from tests.helpers.tasks import ALL, read


def test_key_value_rows(tmp_path):
    row = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"]], "key": "k2", "value": "v2"}
    good, bad = read("kv_retrieval", [row, row | {"key": "k3"}], tmp_path)
    assert good.prompt(good.questions[0]) == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'JSON data:\n{"k1": "v1",\n "k2": "v2"}\n\nKey: "k2"\nCorresponding value:'
    )
    assert good.metadata["places"] == [1]
    assert ALL["kv_retrieval"].score('"V2"', good.questions[0]).value == 1
    assert "k3" in bad.why


def test_loogle_rows_are_parsed_and_never_evaluated(tmp_path):
    pairs = [{"Q": "Who?", "A": "Bob", "type": "x"}, {"Q": "Where?", "A": "Rome"}]
    row = {"input": "A text.", "title": "T", "qa_pairs": str(pairs), "output": "None"}
    bad = row | {"qa_pairs": "[{'Q': 'Who?', 'A': open('x')}]"}
    empty = row | {"qa_pairs": "[]"}
    good, *rest = read("loogle_shortdep_qa", [row, bad, empty], tmp_path)
    assert len(good.questions) == 2
    assert good.prompt(good.questions[1]) == (
        "Please answer the question based on the long texts below. \nA text.\n"
        "Question: Where?\nAnswer: "
    )
    assert all(isinstance(one, UnreadableSample) and "qa_pairs" in one.why for one in rest)
    summary = {"input": "A paper.", "title": "T", "qa_pairs": "none", "output": "It is good."}
    (record,) = read("loogle_longdep_summarization", [summary], tmp_path)
    assert record.questions[0].answers == ("It is good.",)
    cloze = row | {"qa_pairs": str([{"Q": "<mask-0> ate.", "A": {"<mask-0>": "Bob"}}])}
    (record,) = read("loogle_shortdep_cloze", [cloze], tmp_path)
    assert "{'<mask-0>': 'Bob', '<mask-1>'" in record.context
    task = ALL["loogle_shortdep_cloze"]
    assert task.score("{'<mask-0>': 'Bob'}", record.questions[0]).value == 1


@pytest.mark.parametrize(
    ("task", "fields", "ending", "right"),
    [
        ("passkey", {"input": "What?", "answer": ["123"]}, "What?\n\nThe pass key is", "123"),
        ("number_string", {"input": "What?", "answer": "1"}, "The sequence of digits is", "1"),
        ("kv_retrieval", {"input": "Key: k", "answer": ["v"]}, "text\n\nKey: k", "v"),
        ("longbook_qa_eng", {"input": "Who?", "answer": ["Bob"]}, "Question: Who?\nAnswer:", "Bob"),
        ("longbook_qa_chn", {"input": "谁？", "answer": ["张"]}, "问题：谁？\n答案：", "张"),
        ("longbook_sum_eng", {"answer": ["A tale."]}, "text\n\nSummary:", "A tale."),
        ("longdialogue_qa_eng", {"answer": ["BOB"]}, "with $$MASK$$ is likely", "Bob"),
        (
            "longbook_choice_eng",
            {"input": "Who?", "answer": ["y"], "options": ["w", "x", "y", "z"]},
            "Question: Who?\nA. w\nB. x\nC. y\nD. z\n\nThe letter of the correct answer is",
            "C",
        ),
        (
            "code_debug",
            {"answer": ["f3"], "options": ["f1", "f2", "f3", "f4"]},
            "Options:\nA. f1\nB. f2\nC. f3\nD. f4\n\nThe correct option is:",
            "C.",
        ),
        ("math_calc", {"answer": [1, 2]}, "text\nValues:", "1, 2"),
        (
            "math_find",
            {"input": "The largest number of the list is:", "answer": 9},
            "text\n\nThe largest number of the list is:",
            "9",
        ),
        (
            "code_run",
            {"input": "Return func_12(-3).", "answer": 5},
            "value of func_12(-3). The value of func_12(-3) is",
            "5",
        ),
    ],
)
def test_infinitebench_rows(task, fields, ending, right, tmp_path):
    row = {"id": 0, "context": "text", **fields}
    (record,) = read(f"infinitebench_{task}", [row], tmp_path)
    question = record.questions[0]
    assert record.context.endswith("text")
    assert record.prompt(question).endswith(ending)
    scored = ALL[record.task].score(right, question)
    assert (scored.value, scored.failed) == (1, None)
    # Where the question stands in front, an agnostic compression has seen it.
    assert record.metadata["question_first"] == (task in ("math_find", "code_run"))


@pytest.mark.parametrize("which", [
    "largest", "second largest", "third largest", "smallest", "second smallest", "third smallest",
    "median",
])  # fmt: skip
def test_all_seven_numbers_that_math_find_asks_for_are_read(which, tmp_path):
    asked = f"You should answer with only one number. The {which} number of the list is:"
    (record,) = read("infinitebench_math_find", [
        {"context": "[1, 2]", "input": asked, "answer": 2}
    ], tmp_path)  # fmt: skip
    assert isinstance(record, TaskSample)
    expected = f"What is the {which} number in the following list?\n\n[1, 2]\n\n{asked}"
    assert record.prompt(record.questions[0]) == expected


def test_infinitebench_rows_that_do_not_fit(tmp_path):
    row = {"context": "text", "input": "Who?", "answer": ["y"], "options": ["w", "x", "y", "z"]}
    bad = [{"options": ["y"]}, {"answer": ["q"]}, {"answer": []}]
    for record in read("infinitebench_longbook_choice_eng", [row | b for b in bad], tmp_path):
        assert isinstance(record, UnreadableSample)
    for task in ("code_run", "math_find"):
        (record,) = read(f"infinitebench_{task}", [row], tmp_path)
        assert "field 'input'" in record.why


def test_scbench_rows_are_queries_alone_or_turns(tmp_path):
    turns = [{"input": "Key: k1", "answer": "v1"}, {"input": "Key: k2", "answer": ["v2"]}]
    row = {"id": 0, "context": "{}", "multi_turns": turns}
    for conversation in (False, True):
        (record,) = read("scbench_kv", [row], tmp_path, conversation=conversation)
        assert record.conversation == conversation
        assert [question.text for question in record.questions] == ["\n\nKey: k1", "\n\nKey: k2"]
        assert ALL["scbench_kv"].score("it is v2", record.questions[1]).value == 1
    choices = {"input": "Who?", "answer": "y", "options": ["w", "x", "y", "z"]}
    (record,) = read("scbench_choice_eng", [row | {"multi_turns": [choices]}], tmp_path)
    assert ALL["scbench_choice_eng"].score("C", record.questions[0]).value == 1
    numbers = {"input": "The largest number is", "answer": 9}
    (record,) = read("scbench_mf", [row | {"multi_turns": [numbers]}], tmp_path)
    assert record.questions[0].text == "\n\nWhat is the largest number?\n\nThe largest number is"


def scbench_turn(answer):
    return {"multi_turns": [{"input": "The largest number is", "answer": answer}]}


@pytest.mark.parametrize(
    ("name", "odd", "field"),
    [
        ("infinitebench_code_run", {"answer": None}, "'answer': None is no text or integer"),
        ("infinitebench_code_run", {"answer": [5.5]}, "'answer': 5.5"),
        ("infinitebench_code_run", {"answer": True}, "'answer': True"),
        ("infinitebench_passkey", {"answer": None}, "'answer': None"),
        ("infinitebench_kv_retrieval", {"answer": [{}]}, "'answer': {}"),
        ("infinitebench_math_calc", {"answer": [[]]}, "'answer': it is empty"),
        ("infinitebench_math_calc", {"answer": [1, "2"]}, "'answer': '2' is no integer"),
        ("infinitebench_math_find", {"answer": "9"}, "'answer': '9' is no number"),
        ("infinitebench_longbook_qa_eng", {"answer": [None]}, "'answer': None is no text"),
        ("infinitebench_longbook_qa_chn", {"answer": 5}, "'answer': 5 is no text"),
        ("infinitebench_longbook_choice_eng", {"answer": [5, "A"]}, "'answer': 5 is no text"),
        ("scbench_kv", scbench_turn(5), "answer': 5 is no text"),
        ("scbench_kv", scbench_turn(None), "answer': None is no text"),
        ("scbench_vt", scbench_turn(["A", 5]), "answer': 5 is no text"),
        ("scbench_qa_eng", scbench_turn(None), "answer': None"),
        ("scbench_qa_chn", scbench_turn(5), "answer': 5 is no text"),
        ("scbench_mf", scbench_turn(None), "answer': None is no number"),
        ("scbench_summary", scbench_turn([]), "answer': it is empty"),
        ("loogle_shortdep_qa", {"qa_pairs": "[{'Q': 5, 'A': 'a'}]"}, "'qa_pairs': a question is 5"),
        ("loogle_shortdep_qa", {"qa_pairs": "-" * 300_000 + "1"}, "'qa_pairs': no list"),
        ("loogle_shortdep_qa", {"qa_pairs": "5"}, "'qa_pairs': no list"),
        (
            "loogle_shortdep_cloze",
            {"qa_pairs": "[{'Q': '<mask-0>', 'A': {'<mask-0>': 5}}]"},
            "'qa_pairs': masks and names",
        ),
    ],
)
def test_a_label_of_another_type_is_named_before_the_model_runs(name, odd, field, tmp_path):
    options = ["w", "x", "y", "z"]
    asked = "Return func_1(2). The largest number of the list is:"
    row = {"context": "text", "input": asked, "answer": "x", "options": options, **odd}
    (record,) = read(name, [row], tmp_path)
    assert isinstance(record, UnreadableSample)
    assert record.where.endswith("rows.jsonl:1") and field in record.why


def test_gsm8k_with_and_without_solved_examples(tmp_path):
    row = {"question": "2 * 600?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}
    (plain,) = read("gsm8k", [row], tmp_path)
    assert plain.prompt(plain.questions[0]) == "Question: 2 * 600?\nAnswer:"
    assert plain.questions[0].answers == ("1200",)
    assert ALL["gsm8k"].phase == "decode"
    shots = tmp_path / "shots.jsonl"
    shots.write_text("\n".join([json.dumps(row)] * 6), encoding="utf-8")
    (record, bad) = read("gsm8k", [row, row | {"answer": "1200"}], tmp_path, shots=shots)
    assert record.context.count("Answer: 2 * 600 =") == 5
    assert not record.chat and plain.chat
    assert isinstance(bad, UnreadableSample)
    task = ALL["gsm8k"]
    assert task.score("in all $1,200.", record.questions[0]).value == 1
    assert task.metrics["strict_match"]("in all 1,200", record.questions[0]).failed
    shots.write_text("{", encoding="utf-8")
    with pytest.raises(KvfoldError, match=r"shots\.jsonl:1"):
        read("gsm8k", [row], tmp_path, shots=shots)


def test_math500_and_mt_bench_rows(tmp_path):
    row = {"problem": "1/2?", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1}
    (record,) = read("math500", [row], tmp_path)
    assert "\\boxed{}" in record.questions[0].text
    assert ALL["math500"].score("\\boxed{0.5}", record.questions[0]).value == 1
    row = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
    (record,) = read("mt_bench", [row], tmp_path)
    assert record.conversation and [q.text for q in record.questions] == ["Write.", "Rewrite."]
    assert record.metadata["temperature"] == 0.7
