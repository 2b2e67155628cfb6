# SPDX-License-Identifier: Apache-2.0
"""`kvfold eval`: what it prints, goes on with, and refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvfold.cli import app
from kvfold.errors import KvfoldError
from kvfold.eval.evaluate import drawn
from kvfold.eval.tasks import SampleRequest
from tests.helpers.evaluation import Setting, command, own_questions
from tests.helpers.tasks import longbench_row


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.fixture(scope="module")
def folder(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, for other processes to load."""
    path = tmp_path_factory.mktemp("model")
    setting.plain.save_pretrained(path)
    setting.tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_json_is_all_that_is_on_standard_output(folder, tmp_path):
    how = ("--model", folder, "--methods", "snapkv:window=8", "--budgets", "0.5")
    size = ("--samples", 1, "--lengths", 300, "--out", tmp_path, "--json")
    # The notes about what is left out, and about the records, are elsewhere.
    done = command("--tasks", "kv_retrieval,loogle", *how, *size)
    assert done.exit_code == 0 and "left out: loogle" in done.stderr
    said = json.loads(done.stdout)
    assert said["file"] == str(tmp_path / "records.jsonl")
    written = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(written) == 5
    for told, row in zip(said["records"], written, strict=True):
        assert told["cell.method"] == row["cell"]["method"]
        assert told["score.value"] == row["score"]["value"]
    assert json.loads(command("--tasks", "kv_retrieval", *how, *size).stdout) == said


@pytest.mark.slow
def test_the_command_evaluates_and_goes_on_where_it_was(folder, tmp_path):
    out = tmp_path / "my $out"
    how = ("--model", folder, "--methods", "snapkv:window=8", "--budgets", "0.5", "--out", out)
    size = ("--samples", 1, "--lengths", 300)
    first = command("--tasks", "kv_retrieval,loogle", *how, *size)
    assert first.exit_code == 0, first.output
    assert first.output.count("left out: ") == 1
    assert "left out: loogle needs data, as --data: a folder with shortdep_qa" in first.output
    (said,) = re.findall("tables and a page: (.*)", first.output)
    assert shlex.split(said) == ["kvfold", "report", str(out)]
    shown = " ".join(first.output.split())
    for word in ("score, mean over tasks", "full", "cut", "random", "streaming_llm", "snapkv"):
        assert word in shown
    samples = (out / "samples.jsonl").read_bytes()
    found = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [r["cell"]["method"].partition(":")[0] for r in found] == [
        "full", "cut", "random", "streaming_llm", "snapkv"
    ]  # fmt: skip
    assert [r["cell"]["length"] for r in found] == [300] * 5
    assert all(r["samples"] == 1 and not r["errors"] for r in found)
    again = command("--tasks", "kv_retrieval", *how, *size)
    assert again.exit_code == 0 and "holds 5 records already" in " ".join(again.output.split())
    assert (out / "samples.jsonl").read_bytes() == samples
    (out / "samples.jsonl").write_bytes(samples + b"mine\n")
    refused = command("--tasks", "kv_retrieval", *how, *size)
    assert refused.exit_code == 2 and "line 6 of" in refused.stderr
    assert (out / "samples.jsonl").read_bytes() == samples + b"mine\n"


def test_methods_without_a_budget_run_alone_and_options_are_in_the_records(folder, tmp_path):
    methods = ("--methods", "full,simlayerkv:window=8", "--budgets", "")
    how = ("--model", folder, *methods, "--out", tmp_path)
    size = ("--samples", 3, "--lengths", 300, "--batch-size", 2, "--answer-tokens", 3)
    done = command("--tasks", "kv_retrieval", *how, *size, "--workers", 1)
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["cell"]["method"] for record in found] == ["full", "simlayerkv:window=8"]
    for record in found:
        assert not record["errors"] and record["samples"] == 3, record["errors"]
        assert record["cell"]["protocol"]["answer_tokens"] == 3 == record["answer_tokens"]
        assert record["prefill_operations"] > 0 < record["step_operations"]


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--tasks", "perplexity"), "perplexity needs data"),
        (("--tasks", "longbench_qasper,kv_retrieval"), "qasper needs data"),
        (("--tasks", "loogle"), "none of the tasks can be run: loogle needs data, as --data:"),
        (("--tasks", "longbench", "--data", "."), "has no narrativeqa.jsonl, qasper.jsonl,"),
        (("--tasks", "jsonl", "--data", "absent.jsonl"), "there is no file absent.jsonl"),
        (("--tasks", "nothing"), "unknown task 'nothing'"),
        (("--tasks", "niah", "--methods", "snapvk"), "did you mean 'snapkv'"),
        (("--tasks", "niah", "--budgets", "1.5"), "at most 1.0"),
        (("--tasks", "niah", "--budgets", ""), "snapkv needs a budget: give --budgets"),
        (("--tasks", "niah_magic", "--lengths", "12"), "12 tokens cannot hold"),
        (("--tasks", "niah", "--lengths", "many"), "'many' is no positive whole number"),
        (("--tasks", "mt_bench", "--data", "nowhere.jsonl"), "there is no file nowhere.jsonl"),
    ],
)
def test_the_command_says_what_it_cannot_do(folder, tmp_path, arguments, word):
    out = tmp_path / "out"
    refused = command(*arguments, "--model", folder, "--out", out)
    assert refused.exit_code == 2, refused.output
    assert "Traceback" not in refused.output
    message = refused.stderr.splitlines()[-1]
    assert message.startswith("error: ") and word in message
    assert not (out / "samples.jsonl").exists()


def test_a_run_without_any_answer_says_why_and_fails(folder, tmp_path):
    rows = ["{}\n", '{"turns": 1}\n', b"\xff\xfe\x00\n".decode("latin1"), "{}\n"]
    data, out = tmp_path / "question.jsonl", tmp_path / "out"
    data.write_bytes("".join(rows).encode("latin1"))
    failed = command("--tasks", "mt_bench", "--data", data, "--model", folder, "--workers", 1,
                     "--methods", "full", "--budgets", "0.5", "--out", out)  # fmt: skip
    assert failed.exit_code == 1, failed.output
    shown = " ".join(failed.output.split())
    # Four cells: full, and three baselines at one budget. The path is in the reason.
    for line, why in ((1, "field 'question_id'"), (3, "no UTF-8")):
        assert f"failed: 4 × {data}:{line}: {why}" in shown
    reported = CliRunner().invoke(app, ["report", str(out), "--out", str(tmp_path / "page")])
    assert reported.exit_code == 1 and "failed: 4 × " in reported.output
    assert (tmp_path / "page" / "index.html").exists()


@pytest.mark.slow
def test_some_failures_are_said_and_the_run_succeeds(folder, tmp_path):
    data, out = tmp_path / "kv_retrieval.jsonl", tmp_path / "out"
    row = {"ordered_kv_records": [["a", "b"], ["c", "d"]], "key": "c", "value": "d"}
    data.write_text(json.dumps(row) + "\n{}\n")
    ran = command("--tasks", "kv_retrieval", "--data", data, "--model", folder, "--workers", 1,
                  "--methods", "full", "--budgets", "0.9", "--out", out)  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert f"failed: 4 × {data}:2: field 'ordered_kv_records'" in " ".join(ran.output.split())


def test_the_command_says_at_once_which_rows_it_cannot_read(folder, tmp_path):
    data = own_questions(tmp_path / "own.jsonl")
    ran = command("--tasks", "jsonl", "--data", data, "--model", folder, "--workers", 1,
                  "--methods", "full", "--budgets", "0.5", "--out", tmp_path / "out")  # fmt: skip
    assert ran.exit_code == 0, ran.output
    shown = " ".join(ran.output.split())
    assert f"cannot be read: {data}:3: field 'question'" in shown
    assert shown.index("cannot be read") < shown.index("score, mean over tasks")


@pytest.mark.slow
def test_data_without_rows_of_a_named_task_is_refused(folder, tmp_path):
    data, out = tmp_path / "empty.jsonl", tmp_path / "out"
    data.write_text("\n", encoding="utf-8")
    refused = command("--tasks", "jsonl", "--data", data, "--model", folder, "--out", out)
    assert refused.exit_code == 2, refused.output
    message = refused.stderr.splitlines()[-1]
    assert message.startswith("error: ") and "empty.jsonl has no rows of jsonl" in message
    assert not out.exists()


def test_tasks_of_a_benchmark_without_rows_are_left_out_in_one_line(tmp_path):
    data, said = tmp_path / "rows.jsonl", list[str]()
    data.write_text(json.dumps(longbench_row("qasper")), encoding="utf-8")
    (only,) = drawn(["longbench"], SampleRequest(data=str(data)), [512], said.append)
    assert only.task.name == "longbench_qasper"
    assert len(said) == 1
    assert "rows.jsonl has no rows of longbench_narrativeqa, longbench_multifieldqa_en" in said[0]
    with pytest.raises(KvfoldError, match="has no rows of longbench_trec"):
        list(drawn(["longbench_trec"], SampleRequest(data=str(data)), [512]))


@pytest.mark.parametrize(
    ("option", "name"),
    [("--data", "records.jsonl"), ("--haystack", "samples.jsonl"), ("--shots", "records.jsonl")],
)
def test_what_a_run_reads_is_never_overwritten(option: str, name: str, tmp_path: Path) -> None:
    mine = tmp_path / name
    mine.write_text('{"context": "blue sky", "question": "Which sky?", "answer": "blue"}\n')
    (tmp_path / "link").symlink_to(mine)
    size = ("--samples", 1, "--lengths", 300, "--out", tmp_path, "--model", "no/model")
    for given in (mine, tmp_path / "link"):
        refused = command("--tasks", "niah_magic", option, given, *size)
        assert refused.exit_code == 2 and "would be overwritten" in " ".join(refused.stderr.split())
