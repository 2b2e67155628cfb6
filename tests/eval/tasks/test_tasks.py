# SPDX-License-Identifier: Apache-2.0
"""Tasks: what they generate, how they read the benchmarks' rows, and what they say of bad ones."""

import dataclasses
import itertools
import json
import random
import re
import sys
import types
from collections import Counter

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import longbench as longbench_metrics
from kvfold.eval.metrics import named
from kvfold.eval.tasks import SampleRequest, TaskSample, UnreadableSample, families, select, tasks
from kvfold.eval.tasks import needle as needles
from kvfold.eval.tasks.generated import tokens
from kvfold.eval.tasks.haystack_size import largest_haystack
from kvfold.eval.tasks.longbench_prompts import MAX_NEW_TOKENS, PROMPTS

ALL = tasks()
GENERATED = [name for name, task in ALL.items() if task.generated]
ESSAYS = (
    "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"
)  # fmt: skip


def count(text):
    """Pieces of words and signs, about what a tokenizer makes of English."""
    return len(re.findall(r" ?\w{1,5}|\W", text))


def made(name, samples=2, **options):
    """Records of a generated task."""
    options = {"length": 1500, "count": count, "samples": samples, **options}
    return list(ALL[name].samples(SampleRequest(**options)))


def read(name, rows, tmp_path, **options):
    """Records of a task from rows in a file."""
    file = tmp_path / "rows.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    return list(ALL[name].samples(SampleRequest(data=str(file), **options)))


# --- the registry ------------------------------------------------------------------------------


def test_every_benchmark_is_there_whole():
    members = Counter(task.benchmark for task in ALL.values())
    assert members["ruler"] == 13
    assert members["longbench"] == 21
    assert members["longbench_e"] == 13
    assert members["infinitebench"] == 12
    assert members["loogle"] == 4
    assert {"gsm8k", "math500", "mt_bench", "longbench_v2", "perplexity", "niah"} <= set(members)


def test_every_task_says_what_it_is():
    for name, task in ALL.items():
        assert task.name == name
        assert task.summary and task.source and task.group
        assert "\n" not in task.summary
        assert bool(task.metric) != (task.by_likelihood or name == "mt_bench")
        assert not task.generated or task.truncation == "none"


def test_eleven_of_rulers_tasks_are_generated():
    ruler = [task for task in ALL.values() if task.benchmark == "ruler"]
    assert sum(task.generated for task in ruler) == 11
    assert {task.metric for task in ruler} == {"string_match_all", "string_match_part"}
    assert [task.name for task in ruler if task.metric == "string_match_part"] == [
        "ruler_qa_1",
        "ruler_qa_2",
    ]


def test_tasks_are_chosen_by_name_or_by_benchmark():
    assert len(select(["ruler"])) == 13
    assert [task.name for task in select(["gsm8k", "ruler_vt", "gsm8k"])] == ["gsm8k", "ruler_vt"]
    with pytest.raises(KvfoldError, match=r"unknown task 'rulers'.*longbench"):
        select(["rulers"])


def test_a_task_without_a_metric_refuses_to_score():
    with pytest.raises(KvfoldError, match="no metric"):
        ALL["mt_bench"].score("", None)


# --- generated tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1200, 4500])
@pytest.mark.parametrize("name", GENERATED)
def test_generated_samples_fill_the_length_and_hold_their_answers(name, length):
    for record in made(name, length=length):
        used = tokens(record, count)
        assert record.metadata["tokens"] == used
        # The largest haystack that fits: a unit more would not.
        unit = 140 if "kv" in name or "niah_multikey" in name else 100
        assert length - unit * (3 if name == "ruler_cwe" else 1) <= used <= length
        for question in record.questions:
            assert question.answers
            assert all(answer in record.context for answer in question.answers)
            assert not any(f" {answer} " in question.text for answer in question.answers)
            perfect = ALL[name].score(" ".join(question.answers), question)
            assert (perfect.value, perfect.failed) == (1, None)
            assert ALL[name].score("nothing of it", question).value == 0


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_seed_gives_the_same_samples_and_another_others(name):
    first, second = made(name)
    assert (first.index, second.index) == (0, 1)
    assert first.context != second.context
    assert made(name) == [first, second]
    # A sample does not depend on how many are asked for.
    assert made(name, samples=1) == [first]
    contexts = [[record.context for record in made(name, 4, seed=seed)] for seed in (0, 1)]
    assert contexts[0] != contexts[1]


@pytest.mark.parametrize("name", GENERATED)
def test_a_length_that_cannot_hold_a_sample_is_refused(name):
    with pytest.raises(KvfoldError, match="tokens cannot hold"):
        made(name, length=60)


def test_generated_tasks_need_a_way_to_count():
    with pytest.raises(KvfoldError, match="count="):
        made("ruler_vt", count=None)


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


def test_words_come_from_a_folder_where_one_is_given(tmp_path):
    for kind, words in {"adjective": "odd even", "noun": "prime root sum", "verb": "add"}.items():
        (tmp_path / f"{kind}list.txt").write_text("\n".join(words.split()), encoding="utf-8")
    record = made("ruler_niah_single_1", 1, words=tmp_path)[0]
    assert re.search(r"numbers for (odd|even)-(prime|root|sum) is", record.context)
    with pytest.raises(KvfoldError, match="too many"):
        made("ruler_cwe", 1, words=tmp_path)
    (tmp_path / "verblist.txt").unlink()
    with pytest.raises(KvfoldError, match="verblist"):
        made("ruler_cwe", 1, words=tmp_path)


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Passage {article}.{part} is about topic {article}.",
                    "qas": [
                        {
                            "question": f"What is passage {article}.{part} about?",
                            "is_impossible": part == 1,
                            "answers": [{"text": f"topic {article}"}, {"text": f"{article}"}],
                        }
                    ],
                }
                for part in range(3)
            ]
        }
        for article in range(40)
    ]
}
HOTPOT = [
    {
        "question": f"Who knows {n}?",
        "answer": f"Person {n}",
        "context": [[f"Title {n}", [f"Person {n} knows ", f"{n}."]], [f"Other {n}", ["Nothing."]]],
    }
    for n in range(60)
]


@pytest.mark.parametrize(
    ("name", "file", "data"), [("qa_1", "squad.json", SQUAD), ("qa_2", "hotpotqa.json", HOTPOT)]
)
def test_questions_are_asked_among_other_passages(name, file, data, tmp_path):
    (tmp_path / file).write_text(json.dumps(data), encoding="utf-8")
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


def test_the_search_for_a_size_ends_and_finds_the_largest():
    rng = random.Random(0)
    for _ in range(200):
        slope, base, limit = rng.uniform(0.3, 40), rng.randint(0, 300), rng.randint(350, 9000)
        calls = []

        def size(n, slope=slope, base=base, calls=calls):
            calls.append(n)
            return base + int(slope * n)

        best = largest_haystack(size, limit, 1)
        assert size(best) <= limit < size(best + 1)
        assert len(calls) < 40
        assert largest_haystack(size, limit, 1, 7) == min(best, 7)
    with pytest.raises(KvfoldError, match="100 tokens cannot hold a haystack, which takes at"):
        largest_haystack(lambda n: 101, 100, 1, what="a haystack")


def test_windows_of_a_book_follow_each_other(tmp_path):
    book = " ".join(f"word{n}" for n in range(2000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    records = made("perplexity", 3, length=400, data=str(tmp_path / "book.txt"))
    assert book.startswith("".join(record.context for record in records))
    assert all(record.metadata["tokens"] == 400 for record in records)
    assert all(record.questions == () for record in records)
    every = made("perplexity", None, length=400, data=str(tmp_path / "book.txt"))
    assert len(every) == count(book) // 400
    with pytest.raises(KvfoldError, match="needs data"):
        made("perplexity")


# --- the benchmarks' own rows ------------------------------------------------------------------


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


def longbench_row(task, **fields):
    return {
        "dataset": task,
        "language": "en",
        "context": "A {context} with {input} braces.",
        "input": "Who?",
        "answers": ["Bob", "Robert"],
        "all_classes": ["Bob", "Eve"],
        "length": 4200,
        **fields,
    }


def test_longbench_prompts_are_split_where_the_context_ends(tmp_path):
    assert len(PROMPTS) == len(MAX_NEW_TOKENS) == len(longbench_metrics.METRICS) == 21
    for task, prompt in PROMPTS.items():
        row = longbench_row(task)
        (record,) = read(f"longbench_{task}", [row], tmp_path)
        question = record.questions[0]
        assert record.prompt(question) == prompt.format(context=row["context"], input=row["input"])
        assert record.context.endswith(row["context"])
        assert question.answers == ("Bob", "Robert")
        assert question.max_new_tokens == MAX_NEW_TOKENS[task]


def test_oddities_of_longbenchs_prompts():
    assert PROMPTS["narrativeqa"].count("asconcisely") == 2
    assert "\n\n Answer the question based on the above article" in PROMPTS["qasper"]
    assert PROMPTS["passage_count"].endswith("The final answer is: ")
    assert PROMPTS["passage_retrieval_en"].endswith("The answer is: ")
    assert PROMPTS["lcc"].endswith("{context}Next line of code:\n")
    assert PROMPTS["repobench-p"].endswith("{context}{input}Next line of code:\n")


def test_longbench_few_shot_and_code_take_no_chat_template(tmp_path):
    records = {t: read(f"longbench_{t}", [longbench_row(t)], tmp_path)[0] for t in PROMPTS}
    assert {task for task, record in records.items() if not record.chat} == {
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"
    }  # fmt: skip
    assert {task for task, record in records.items() if record.stop} == {"samsum"}
    assert {task for task, record in records.items() if record.nonempty} == {"samsum"}


def test_longbench_tasks_pick_their_rows_and_name_the_bucket(tmp_path):
    lengths = (3999, 4000, 7999, 8000)
    rows = [longbench_row("trec"), *(longbench_row("qasper", length=n) for n in lengths)]
    for name in ("longbench_qasper", "longbench_e_qasper"):
        records = read(name, rows, tmp_path)
        assert [record.index for record in records] == [0, 1, 2, 3]
        buckets = [record.metadata["bucket"] for record in records]
        assert buckets == ["0-4k", "4-8k", "4-8k", "8k+"]
    assert len(read("longbench_qasper", rows, tmp_path, samples=2)) == 2


def test_longbench_scores_in_the_tasks_metric(tmp_path):
    trec = ALL["longbench_trec"]
    (record,) = read("longbench_trec", [longbench_row("trec")], tmp_path)
    assert trec.metric == "classification"
    assert trec.score("Bob\nEve", record.questions[0]).value == 1
    assert list(ALL["longbench_lcc"].metrics) == ["code_sim", "code_sim_rapidfuzz"]


def test_longbench_v2(tmp_path):
    row = {
        "context": " A long text. ", "question": "What? ", "choice_A": "one", "choice_B": "two",
        "choice_C": "three", "choice_D": "four", "answer": "B", "difficulty": "hard",
        "length": "short", "domain": "Single-Document QA",
    }  # fmt: skip
    good, bad = read("longbench_v2", [row, row | {"answer": "E"}], tmp_path)
    assert good.prompt(good.questions[0]) == (
        "Please read the following text and answer the question below.\n\n<text>\nA long text.\n"
        "</text>\n\nWhat is the correct answer to this question: What?\nChoices:\n(A) one\n"
        "(B) two\n(C) three\n(D) four\n\nFormat your response as follows: "
        '"The correct answer is (insert answer here)".'
    )
    task = ALL["longbench_v2"]
    assert task.score("The correct answer is (B)", good.questions[0]).value == 1
    assert task.metrics["compensated_accuracy"]("?", good.questions[0]).value == 0.25
    assert good.metadata == {
        "difficulty": "hard",
        "length": "short",
        "domain": "Single-Document QA",
    }
    assert isinstance(bad, UnreadableSample) and "answer" in bad.why


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


# --- what is wrong with a row or a file --------------------------------------------------------


def test_bad_rows_are_named_by_file_and_line_and_the_others_are_read(tmp_path):
    good = longbench_row("qasper")
    rows = [
        good,
        '{"context": ',
        "",
        good | {"context": ""},
        good | {"answers": "Bob"},
        good | {"answers": []},
        "[1]",
        {"dataset": "qasper"},
        good,
    ]
    found = read("longbench_qasper", rows, tmp_path)
    assert [type(one) for one in found] == [TaskSample, *[UnreadableSample] * 6, TaskSample]
    assert [record.index for record in found if isinstance(record, TaskSample)] == [0, 7]
    bad = found[1:-1]
    assert [one.where.rsplit(":", 1)[1] for one in bad] == ["2", "4", "5", "6", "7", "8"]
    assert all(one.where.startswith(str(tmp_path / "rows.jsonl")) for one in bad)
    for one, word in zip(
        bad, ("JSON", "'context'", "'answers'", "'answers'", "list", "'context'"), strict=True
    ):
        assert word in one.why


def test_a_folder_holds_a_file_per_task(tmp_path):
    (tmp_path / "qasper.jsonl").write_text(json.dumps(longbench_row("qasper")), encoding="utf-8")
    (record,) = ALL["longbench_qasper"].samples(SampleRequest(data=str(tmp_path)))
    assert record.task == "longbench_qasper"
    with pytest.raises(KvfoldError, match=r"no file .*trec\.jsonl"):
        list(ALL["longbench_trec"].samples(SampleRequest(data=str(tmp_path))))


@pytest.mark.parametrize("name", sorted(set(ALL) - set(GENERATED)))
def test_a_task_that_needs_data_says_so(name):
    with pytest.raises(KvfoldError, match="needs data"):
        list(ALL[name].samples(SampleRequest(count=count)))


def test_the_hub_is_read_through_datasets_where_it_is_installed(monkeypatch):
    task, request = ALL["longbench_qasper"], SampleRequest(data="THUDM/LongBench", samples=2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KvfoldError, match="pip install datasets"):
        list(task.samples(request))

    asked = []

    def load(name, subset=None):
        asked.append((name, subset))
        if subset == "passkey":
            raise ValueError("BuilderConfig 'passkey' not found")
        row = {"context": "text", "input": "What?", "answer": ["1"]}
        return {"train": [], "test": [longbench_row("qasper")] * 3, "passkey": [row]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert len(list(task.samples(request))) == 2
    assert asked == [("THUDM/LongBench", "qasper")]
    (record,) = ALL["infinitebench_passkey"].samples(SampleRequest(data="a/b"))
    assert record.questions[0].answers == ("1",)

    def offline(name, subset=None):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(KvfoldError, match="cannot be read: no route"):
        list(task.samples(request))


def test_records_cannot_be_changed():
    record = made("ruler_niah_single_1", 1)[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.context = ""


def test_the_second_half_of_a_window_is_asked_about(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    options = {"data": str(book), "length": 128, "samples": 2}
    whole = made("perplexity", **options)
    halves = made("continuation", **options)
    assert [r.context for r in whole] == [r.prompt(r.questions[0]) for r in halves]
    for record in halves:
        assert 0 < count(record.context) <= 64 < count(record.prompt(record.questions[0])) <= 128


# --- questions of one's own --------------------------------------------------------------------


def test_own_questions_are_asked_and_scored_as_their_rows_say(tmp_path):
    rows = [
        {"context": "The code is 7.", "question": "Which code?", "answer": "7"},
        {"context": "x", "question": "y?", "answers": ["a cat", "a dog"], "metric": "f1",
         "answer_prefix": " It is", "max_new_tokens": 5, "id": 12},
        {"context": "x", "question": "y?", "answers": ["12"], "metric": "number"},
    ]  # fmt: skip
    plain, chosen, number = read("jsonl", rows, tmp_path)
    task = ALL["jsonl"]
    assert plain.prompt(plain.questions[0]) == "The code is 7.\n\nWhich code?"
    assert task.score("I think 7", plain.questions[0]).value == 1
    assert task.score("a cat", chosen.questions[0]).value == 1
    assert task.score("the dog barks", chosen.questions[0]).value == pytest.approx(2 / 3)
    assert (chosen.questions[0].answer_prefix, chosen.questions[0].max_new_tokens) == (" It is", 5)
    assert task.score("11, no, 12.", number.questions[0]).value == 1
    assert [one.metadata["metric"] for one in (plain, chosen, number)] == [
        "contains", "f1", "number",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "y?", "answer": "a"}, "field 'context'"),
        ({"context": "x", "question": "y?"}, "either 'answer'"),
        ({"context": "x", "question": "y?", "answer": "a", "answers": ["b"]}, "either 'answer'"),
        ({"context": "x", "question": "y?", "answer": 7}, "field 'answer'"),
        ({"context": "x", "question": "y?", "answers": []}, "field 'answers'"),
        ({"context": "x", "question": "y?", "answers": [""]}, "field 'answers': one is empty"),
        ({"context": "x", "question": "y?", "answer": "a", "metric": "bleu"}, "'bleu' is none of"),
        ({"context": "x", "question": "y?", "answer": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_bad_rows_of_own_questions_are_refused_with_line_and_reason(row, why, tmp_path):
    good = {"context": "x", "question": "y?", "answer": "a"}
    first, bad, last = read("jsonl", [good, row, good], tmp_path)
    assert isinstance(first, TaskSample) and isinstance(last, TaskSample)
    assert isinstance(bad, UnreadableSample) and bad.where.endswith(":2") and why in bad.why


def test_every_named_metric_says_what_it_is_and_knows_the_right_answer():
    assert list(named.NAMED) == list(named.MEANS)
    for name, metric in named.NAMED.items():
        right = "\\boxed{12}" if name == "math" else "12"
        assert metric(right, ["13", "12"]).value == (0.5 if name == "contains_all" else 1), name
        assert metric("\\boxed{5}" if name == "math" else "5", ["12"]).value < 1, name


def test_a_benchmarks_own_name_for_a_task_is_a_hint():
    with pytest.raises(KvfoldError, match="did you mean 'ruler_niah_multikey_1'"):
        select(["niah_multikey_1"])
    assert [task.name for task in families()["jsonl"]] == ["jsonl"]
    assert sum(map(len, families().values())) == len(ALL)
