# SPDX-License-Identifier: Apache-2.0
"""A run that is killed, loses workers, or meets bad input; and the command that starts it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.errors import KvfoldError
from kvfold.eval.run import job
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.plan import EvalPlan, TaskSamples, contenders
from kvfold.eval.run.run_folder import (
    counted,
    run_missing,
    samples_file,
    summarize,
    write_records,
)
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import SampleRequest, tasks
from kvfold.evidence.records import RecordFile
from kvfold.hf.chat_template import token_count
from tests.helpers.evaluation import (
    FEW,
    Setting,
    by_itself,
    count,
    finish,
    jobs,
    record,
    records,
    row,
    wanted,
    without_times,
)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.fixture(scope="module")
def plan(setting: Setting) -> EvalPlan:
    return plan_of(setting, 5, 2)


def plan_of(setting: Setting, alone: int, together: int) -> EvalPlan:
    """Two tasks, with all that everything is compared with, and samples that go wrong."""
    kv = [record("kv_retrieval", index=i, metadata={"depth": i}) for i in range(alone)]
    kv[2] = replace(kv[2], questions=(replace(kv[2].questions[0], max_new_tokens=5000),))
    shared = [record("shared_kv", 2, index=i, count=15, new=3) for i in range(together)]
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


@pytest.mark.whole
def test_ten_kills_lose_and_repeat_nothing(setting, tmp_path_factory, tmp_path):
    plan = plan_of(setting, 16, 4)
    uninterrupted = finish(setting, plan, tmp_path_factory.mktemp("whole"))
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


@pytest.mark.slow
def test_results_are_on_disk_as_soon_as_their_cell_ends(setting, tmp_path):
    plan = setting.plan(FEW, wanted([record()]))
    file = samples_file(tmp_path)
    for done in run_missing(plan, file, by_itself(setting)):
        assert count(file.path) == done
    assert done == plan.total == 3


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_exception_between_cells_repeats_no_cell(setting, monkeypatch, after):
    (todo,), ran, real = jobs(setting, 1), list[EvalCell](), job._outcomes
    failures = iter([True])

    def failing(*arguments: Any) -> Any:
        first = next(failures, False)
        for number, (cell, outcome) in enumerate(real(*arguments)):
            if first and number == after:
                raise RuntimeError("between two cells")
            ran.append(cell)
            yield cell, outcome
        if first:
            raise RuntimeError("after the last")

    monkeypatch.setattr(job, "_outcomes", failing)
    lines = setting.lines(todo)
    assert [line.error for line in lines] == [None] * 3
    assert [line.cell for line in lines] == list(todo.cells)
    assert len(ran) == 3


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 40, 0.5, -2])
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


@pytest.mark.slow
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
def test_a_full_disk_is_said_in_one_line(plan, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    file = RecordFile(tmp_path / "cells.jsonl", EvalCell)
    with pytest.raises(KvfoldError, match=r"cannot write .*cells\.jsonl: .*No space left"):
        file.add(plan.cells())


@pytest.mark.slow
def test_records_are_replaced_as_a_whole(uninterrupted, tmp_path):
    path = write_records(tmp_path, summarize(uninterrupted))
    assert len(path.read_text().splitlines()) == len(summarize(uninterrupted))
    write_records(tmp_path, summarize(uninterrupted)[:1])
    assert len(path.read_text().splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["records.jsonl"]


def test_records_are_written_in_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    write = Path.write_text
    monkeypatch.setattr(
        Path, "write_text", lambda path, text, encoding="ascii": write(path, text, encoding)
    )
    path = write_records(tmp_path, [CellResult.model_construct(haystack="日記.txt")])
    assert json.loads(path.read_bytes().decode("utf-8"))["haystack"] == "日記.txt"


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("field", [{"context": "another"}, {"answers": ["2"]}])
def test_data_that_has_changed_is_refused_under_the_same_folder(setting, tmp_path, field):
    name, out = "longbench_passage_count", tmp_path / "out"
    finish(setting, setting.plan(FEW, drawn(setting, name, [row(), row()], tmp_path)), out)
    before = samples_file(out).path.read_bytes()
    changed = drawn(setting, name, [row(), row(**field)], tmp_path)
    with pytest.raises(KvfoldError, match="sample 1 of longbench_passage_count is not the one"):
        finish(setting, setting.plan(FEW, changed), out)
    assert samples_file(out).path.read_bytes() == before


@pytest.mark.slow
def test_an_error_is_run_again_and_its_answer_counts(setting, tmp_path, monkeypatch):
    plan = setting.plan(FEW, wanted([record(index=0), record(index=1)]))

    def out_of_memory(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as failing:
        failing.setattr(job, "_outcomes", out_of_memory)
        failed = finish(setting, plan, tmp_path)
        assert {line.error for line in failed} == {"RuntimeError: out of memory"}
        # Failing again adds no line.
        assert len(finish(setting, plan, tmp_path)) == len(failed) == 2 * len(FEW)
    found = finish(setting, plan, tmp_path)
    assert len(found) == 2 * len(failed) and len(counted(found)) == len(failed)
    assert all(line.error is None for line in counted(found))
    assert all(record.samples == 2 and not record.errors for record in summarize(found))


@pytest.mark.slow
def test_samples_of_batches_are_counted_one_by_one(setting, tmp_path):
    plan = replace(setting.plan(FEW, wanted([record(index=i) for i in range(4)])), batch_size=2)
    counts = list(run_missing(plan, samples_file(tmp_path), by_itself(setting)))
    assert counts[0] == 0 and counts[-1] == plan.total == 4 * len(FEW)


def test_samples_of_an_unknown_task_are_refused(setting, tmp_path):
    plan = setting.plan(FEW[:1], wanted([record()]))
    lines = finish(setting, plan, tmp_path)
    foreign = lines[0].model_copy(
        update={"cell": lines[0].cell.model_copy(update={"task": "old_task"})}
    )
    samples_file(tmp_path).add([foreign])
    for work in (lambda: finish(setting, plan, tmp_path), lambda: summarize([foreign])):
        with pytest.raises(KvfoldError, match="task old_task, which this version does not know"):
            work()


def test_two_runs_may_write_their_records_at_once(tmp_path, monkeypatch):
    replace_, ended = os.replace, []

    def other_ends_first(one: Any, other: Any) -> None:
        if not ended:
            ended.append(True)
            write_records(tmp_path, [])
        replace_(one, other)

    monkeypatch.setattr(os, "replace", other_ends_first)
    write_records(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
