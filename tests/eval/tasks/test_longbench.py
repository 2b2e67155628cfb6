# SPDX-License-Identifier: Apache-2.0
"""LongBench and LongBench v2: prompts split where the context ends, oddities, metrics."""

from kvfold.eval.metrics import longbench as longbench_metrics
from kvfold.eval.tasks import UnreadableSample
from kvfold.eval.tasks.longbench import PROMPTS as TASK_PROMPTS
from tests.helpers.tasks import ALL, longbench_row, read

PROMPTS = {task: each.prompt for task, each in TASK_PROMPTS.items()}


def test_longbench_prompts_are_split_where_the_context_ends(tmp_path):
    assert len(PROMPTS) == len(longbench_metrics.METRICS) == 21
    for task, prompt in PROMPTS.items():
        row = longbench_row(task)
        (record,) = read(f"longbench_{task}", [row], tmp_path)
        question = record.questions[0]
        assert record.prompt(question) == prompt.format(context=row["context"], input=row["input"])
        assert record.context.endswith(row["context"])
        assert question.answers == ("Bob", "Robert")
        assert question.max_new_tokens == TASK_PROMPTS[task].max_new_tokens


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
