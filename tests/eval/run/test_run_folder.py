# SPDX-License-Identifier: Apache-2.0
"""A run that is killed, loses workers, or meets bad input; and the command that starts it."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
from typer.testing import CliRunner, Result

import kvfold
from kvfold.cli import app
from kvfold.errors import KvfoldError
from kvfold.eval.run.job import EvalJob, run_job, worker_spec
from kvfold.eval.run.plan import Contender, EvalPlan, TaskSamples, contenders
from kvfold.eval.run.run_folder import run_missing, samples_file, summarize, write_records
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import SampleRequest, tasks
from kvfold.hf.chat_template import token_count
from kvfold.jobs import executor as workers
from kvfold.jobs.executor import WorkerDied, here, in_parallel
from kvfold.jobs.processes import processes
from kvfold.report.load import load_results
from kvfold.report.tables import to_csv
from tests.helpers.evaluation import Setting, record, wanted, words

FEW: list[Contender] = [("full", None), ("knorm", "0.5"), ("knorm", "0.25")]


def by_itself(setting: Setting):
    """Workers that are this process."""
    return here(worker_spec("tiny"), setting.model, setting.tokenizer)


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


def without_times(samples: Iterable[SampleResult]) -> list[dict[str, Any]]:
    times = {"outcome": {"prefill_seconds", "answer_seconds"}, "at": True, "setup": {"threads"}}
    return [sample.model_dump(exclude=times) for sample in samples]


def records(samples: list[SampleResult]) -> list[dict[str, Any]]:
    times = {"prefill_seconds", "seconds_per_token", "setups"}
    return [each.model_dump(exclude=times) for each in summarize(samples)]


def finish(setting: Setting, plan: EvalPlan, out: Path) -> list[SampleResult]:
    """All samples of a folder, after what was missing was run here."""
    out.mkdir(exist_ok=True)
    counts = list(run_missing(plan, samples_file(out), by_itself(setting)))
    assert counts == sorted(counts) and counts[-1] == plan.total
    return samples_file(out).load().records


# --- killed and gone on with -------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(setting: Setting) -> EvalPlan:
    """Two tasks, with all that everything is compared with, and samples that go wrong."""
    kv = [record("kv_retrieval", index=i, metadata={"depth": i}) for i in range(4)]
    kv[2] = replace(kv[2], questions=(replace(kv[2].questions[0], max_new_tokens=5000),))
    shared = [record("shared_kv", 2, index=i, count=15, new=3) for i in range(4)]
    found = contenders(["snapkv:window=8", "kivi:group=8,residual=8"], ["0.5", "20", "4"])
    return setting.plan(found, wanted([*kv]), wanted([*shared]))


@pytest.fixture(scope="module")
def uninterrupted(setting: Setting, plan: EvalPlan, tmp_path_factory: Any) -> list[SampleResult]:
    return finish(setting, plan, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_holds_every_sample_of_every_cell_once(plan, uninterrupted):
    expected = [(cell, i) for cell, each in plan.cells().items() for i in range(len(each.samples))]
    found = [(sample.cell, sample.index) for sample in uninterrupted]
    assert len(found) == plan.total == len(set(found)) and set(found) == set(expected)
    failed = {(s.index, s.cell.budget) for s in uninterrupted if s.error is not None}
    assert failed >= {(2, None), (2, "0.5"), (0, "4")}
    assert sum(s.error is None for s in uninterrupted) > plan.total / 2


@pytest.mark.slow
def test_ten_kills_lose_and_repeat_nothing(setting, plan, uninterrupted, tmp_path):
    generator, file = random.Random(5), tmp_path / "samples.jsonl"
    written = [0]
    for _ in range(10):
        process = multiprocessing.get_context("fork").Process(
            target=finish, args=(setting, plan, tmp_path)
        )
        process.start()
        # Some way on, and then at any moment of a job.
        further, patience = written[-1] + generator.randrange(4), time.monotonic() + 60
        while process.is_alive() and count(file) < further and time.monotonic() < patience:
            time.sleep(0.002)
        time.sleep(generator.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        written.append(count(file))
    assert len(set(written)) > 5 and written[-1] < plan.total
    found = finish(setting, plan, tmp_path)
    assert len({(sample.cell, sample.index) for sample in found}) == len(found)
    assert without_times(found) == without_times(uninterrupted)
    assert records(found) == records(uninterrupted)


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 40, 0.5, -1])
def test_a_line_that_is_half_written_is_run_again(setting, plan, uninterrupted, tmp_path, part):
    lines = [sample.model_dump_json().encode() + b"\n" for sample in uninterrupted]
    last = lines[-1][: int(part * len(lines[-1])) if part == 0.5 else part]
    samples_file(tmp_path).path.write_bytes(b"".join(lines[:-1]) + last)
    assert samples_file(tmp_path).load().torn == len(last) > 0
    assert samples_file(tmp_path).load().torn == 0
    assert without_times(finish(setting, plan, tmp_path)) == without_times(uninterrupted)


def test_a_foreign_line_is_refused_and_the_file_is_left_alone(setting, plan, tmp_path):
    file = samples_file(tmp_path).path
    for foreign in (b'{"other": 1}\n', b"notes\n", b"half a note", b'{"cell": {}}\n'):
        file.write_bytes(foreign)
        with pytest.raises(KvfoldError, match=r"line 1 of .*samples\.jsonl"):
            list(run_missing(plan, samples_file(tmp_path), by_itself(setting)))
        assert file.read_bytes() == foreign


def test_more_of_the_same_goes_on_in_the_same_folder(setting, tmp_path):
    samples = [record(index=i) for i in range(3)]
    finish(setting, setting.plan(FEW[:1], wanted(samples[:2])), tmp_path)
    before = samples_file(tmp_path).path.read_bytes()
    found = finish(setting, setting.plan(FEW, wanted(samples)), tmp_path)
    assert samples_file(tmp_path).path.read_bytes().startswith(before)
    assert len(found) == 9
    # What another plan left there is not this one's.
    other = setting.plan(FEW[1:2], wanted([record("shared_kv", 2, new=2)]))
    assert list(run_missing(other, samples_file(tmp_path), by_itself(setting))) == [0, 1]
    assert len(summarize(samples_file(tmp_path).load().records)) == 4


@pytest.mark.slow
def test_records_are_replaced_as_a_whole(uninterrupted, tmp_path):
    path = write_records(tmp_path, summarize(uninterrupted))
    assert len(path.read_text().splitlines()) == len(summarize(uninterrupted))
    write_records(tmp_path, summarize(uninterrupted)[:1])
    assert len(path.read_text().splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]


# --- workers -----------------------------------------------------------------------------------


def jobs(setting: Setting, count: int = 6) -> list[EvalJob]:
    return list(setting.plan(FEW, wanted([record(index=i) for i in range(count)])).jobs({}))


def by_number(samples: Iterable[SampleResult]) -> list[dict[str, Any]]:
    """In one order, whoever was first."""
    ordered = sorted(samples, key=lambda s: (s.index, s.cell.method, s.cell.budget or ""))
    return without_times(ordered)


class Deadly(str):
    """A text that no process survives reading."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGKILL,)


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing(setting, folder):
    todo = jobs(setting)
    alone = [s for each in by_itself(setting)(todo) for s in each]
    killer = replace(todo[0], sample=record(context=Deadly("text")))
    running = processes(worker_spec(str(folder)), 2)([todo[0], killer, *todo[1:]])
    found = list(next(running))
    # Busy or idle: which of the two it is is not known.
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    found += [sample for samples in running for sample in samples]
    died = [sample for sample in found if sample.error is not None]
    assert [(s.index, s.cell.method) for s in died] == [(0, "full")]
    assert "its worker died 2 times" in died[0].error
    assert by_number(s for s in found if s.error is None) == by_number(alone)
    assert multiprocessing.active_children() == []


class Fragile:
    """Executor in this process; a worker dies `fatal[index]` times on the job of that index."""

    def __init__(self, setting: Setting, count: int, fatal: dict[int, int]) -> None:
        self.setting, self.count, self.fatal = setting, count, dict(fatal)
        self.at_work: dict[int, EvalJob] = {}
        self.started = self.ended = 0

    def start_worker(self) -> int:
        self.started += 1
        assert len(self.at_work) < self.count
        return self.started

    def submit(self, worker: int, job: EvalJob) -> None:
        assert worker not in self.at_work
        self.at_work[worker] = job

    def wait(self, busy: Sequence[int]) -> list[int]:
        assert set(busy) == set(self.at_work)
        return [max(busy)]

    def result(self, worker: int) -> list[SampleResult]:
        job = self.at_work.pop(worker)
        if self.fatal.get(job.index, 0):
            self.fatal[job.index] -= 1
            raise WorkerDied
        return run_job(self.setting.model, self.setting.tokenizer, job)

    def shutdown(self, idle: Sequence[int], busy: Sequence[int]) -> None:
        self.ended = len(idle) + len(busy)


def test_a_job_whose_worker_always_dies_is_an_error_and_the_others_are_done(setting):
    todo = [replace(job, index=i) for i, job in enumerate(jobs(setting, 3))]
    executor = Fragile(setting, 2, {1: 1, 3: 1000})
    results = in_parallel(worker_spec("tiny"), executor)(iter(todo))
    found = [sample for samples in results for sample in samples]
    keys = [(sample.cell, sample.index) for sample in found]
    assert len(keys) == len(set(keys)) == sum(len(job.cells) for job in todo)
    failed = [sample for sample in found if sample.error is not None]
    assert {sample.index for sample in failed} == {3}
    assert len(failed) == len(todo[3].cells)
    assert all(f"died {workers.TRIES} times" in sample.error for sample in failed)
    # One for each that died, and none more than there are places.
    assert executor.started == 2 + 1 + workers.TRIES and executor.ended == 2


def test_workers_are_shut_down_when_the_run_is_stopped(setting):
    executor = Fragile(setting, 3, {})
    running: Iterator[list[SampleResult]] = in_parallel(worker_spec("tiny"), executor)(
        jobs(setting)
    )
    next(running)
    running.close()
    assert executor.ended == 3


# --- bad input ---------------------------------------------------------------------------------


def row(**fields: Any) -> dict[str, Any]:
    known = {"context": "Paragraph 1: a cat.", "input": "", "answers": ["1"], "all_classes": None}
    return {**known, "length": 10, **fields}


def drawn(
    setting: Setting, name: str, rows: list[Any], folder: Path, **options: Any
) -> TaskSamples:
    file = folder / "rows.jsonl"
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    count = lambda text: token_count(setting.tokenizer, text)  # noqa: E731
    found = TaskSamples.of(tasks()[name], SampleRequest(data=str(file), count=count, **options))
    short = [
        replace(each, questions=tuple(replace(q, max_new_tokens=3) for q in each.questions))
        if hasattr(each, "questions")
        else each
        for each in found.samples
    ]
    return replace(found, samples=tuple(short))


def test_bad_rows_are_errors_that_name_file_and_line_and_the_others_run(setting, tmp_path):
    rows = [row(), '{"context": "cut o', row(context=""), row(answers="1"), row(answers=[1]), row()]
    plan = setting.plan(FEW, drawn(setting, "longbench_passage_count", rows, tmp_path))
    found = finish(setting, plan, tmp_path / "out")
    assert len(found) == 6 * len(FEW)
    said = {(s.index, s.error and s.error.split(": ")[0]) for s in found}
    file = tmp_path / "rows.jsonl"
    assert said == {(0, None), *((i, f"{file}:{i + 1}") for i in range(1, 5)), (5, None)}
    words = {1: "no JSON", 2: "'context'", 3: "'answers'", 4: "'answers.0'"}
    assert all(words[s.index] in s.error for s in found if s.error)
    assert [r["samples"] for r in records(found)] == [2] * 3
    assert [sum(r["errors"].values()) for r in records(found)] == [4] * 3


def test_a_sample_that_the_model_cannot_read_is_an_error_that_says_how_long_it_is(
    setting, tmp_path
):
    pairs = [[f"key {i}", f"value {i}"] for i in range(30)]
    short = {"ordered_kv_records": pairs[:2], "key": "key 1", "value": "value 1"}
    rows = [short, short | {"ordered_kv_records": pairs}, short]
    plan = setting.plan(FEW, drawn(setting, "kv_retrieval", rows, tmp_path))
    prompts = [setting.prompt(sample) for sample in plan.wanted[0].samples]
    sizes = [prompt.ids.shape[1] + prompt.tokens_after()[1] for prompt in prompts]
    limit = sizes[0] + 1
    plan = replace(plan, protocol=plan.protocol.model_copy(update={"max_length": limit}))
    found = finish(setting, plan, tmp_path / "out")
    assert {s.index for s in found if s.error is None} == {0, 2}
    for sample in found:
        if sample.index == 1:
            assert f"takes {sizes[1]} tokens" in sample.error and f"{limit} are" in sample.error


@pytest.mark.parametrize("field", [{"context": "another"}, {"answers": ["2"]}])
def test_data_that_has_changed_is_refused_under_the_same_folder(setting, tmp_path, field):
    name, out = "longbench_passage_count", tmp_path / "out"
    finish(setting, setting.plan(FEW, drawn(setting, name, [row(), row()], tmp_path)), out)
    before = samples_file(out).path.read_bytes()
    changed = drawn(setting, name, [row(), row(**field)], tmp_path)
    with pytest.raises(KvfoldError, match="sample 1 of longbench_passage_count is not the one"):
        finish(setting, setting.plan(FEW, changed), out)
    assert samples_file(out).path.read_bytes() == before


# --- the command -------------------------------------------------------------------------------


def command(*arguments: object) -> Result:
    """`kvfold eval` with one worker."""
    words = ["eval", "--workers", "1", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "160"})


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
    out = tmp_path / "out"
    how = ("--model", folder, "--methods", "snapkv:window=8", "--budgets", "0.5", "--out", out)
    size = ("--samples", 1, "--lengths", 300)
    first = command("--tasks", "kv_retrieval,loogle", *how, *size)
    assert first.exit_code == 0, first.output
    assert first.output.count("left out: ") == 1
    assert "left out: loogle needs data, as --data: a folder with shortdep_qa" in first.output
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


# --- from Python -------------------------------------------------------------------------------


def own_questions(path: Path) -> Path:
    rows = [
        {"context": words(40, seed), "question": "Which?", "answer": "7", "max_new_tokens": 4}
        for seed in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"context": "x"}\n')
    return path


def test_records_from_python_are_rows_of_a_table(setting, tmp_path):
    methods = ["snapkv:window=8", kvfold.parse("kivi:group=8,residual=8")]
    found = kvfold.evaluate(
        setting.model, setting.tokenizer, "jsonl", methods, [0.5, 16],
        data=own_questions(tmp_path / "own.jsonl"), out=tmp_path / "out",
    )  # fmt: skip
    frame = pandas.DataFrame(found).set_index(["cell.method", "cell.budget"])
    # Full cache and KIVI once; three baselines and SnapKV at two budgets.
    assert len(frame) == 2 + 4 * 2
    assert set(frame["cell.task"]) == {"jsonl"} and set(frame["samples"]) == {2}
    full = frame.loc["full"].iloc[0]
    assert full["kept"] == 1 and full["score.low"] <= full["score.value"] <= full["score.high"]
    small = frame.loc[(str(kvfold.parse("snapkv:window=8")), "16")]
    assert 0 < small["kept"] < 0.5 and small["difference.samples"] == 2
    (reason,) = small["errors"]
    assert reason.startswith(f"{tmp_path / 'own.jsonl'}:3: field 'question'")
    text = to_csv(load_results([tmp_path / "out"]))
    assert next(iter(csv.DictReader(io.StringIO(text)))).keys() == found[0].keys()
    # It goes on where it was: nothing is run again.
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    again = kvfold.evaluate(
        setting.model, setting.tokenizer, ["jsonl"], "snapkv:window=8", 0.5,
        data=tmp_path / "own.jsonl", out=tmp_path / "out",
    )  # fmt: skip
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before
    assert all(record in found for record in again) and len(again) == 5


def test_evaluation_from_python_refuses_what_the_command_refuses(setting, tmp_path):
    def run(*arguments: Any, **options: Any) -> None:
        kvfold.evaluate(setting.model, setting.tokenizer, *arguments, **options)

    for arguments, options, word in (
        (("nothing", "full"), {}, "unknown task"),
        (("niah", "snapkv"), {}, "needs a budget"),
        (("jsonl", "full"), {}, "jsonl needs data"),
        (("jsonl", "full"), {"data": tmp_path / "no.jsonl"}, "there is no file"),
    ):
        with pytest.raises(KvfoldError, match=word):
            run(*arguments, **options)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(KvfoldError, match=r"no sample has an answer: .*bad\.jsonl:1: field"):
        run("jsonl", "full", data=tmp_path / "bad.jsonl")


def test_the_command_says_at_once_which_rows_it_cannot_read(folder, tmp_path):
    data = own_questions(tmp_path / "own.jsonl")
    ran = command("--tasks", "jsonl", "--data", data, "--model", folder, "--workers", 1,
                  "--methods", "full", "--budgets", "0.5", "--out", tmp_path / "out")  # fmt: skip
    assert ran.exit_code == 0, ran.output
    shown = " ".join(ran.output.split())
    assert f"cannot be read: {data}:3: field 'question'" in shown
    assert shown.index("cannot be read") < shown.index("score, mean over tasks")
