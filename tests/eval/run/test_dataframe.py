# SPDX-License-Identifier: Apache-2.0
"""Evaluation from Python: records as rows of a table."""

from __future__ import annotations

import copy
import csv
import io
from typing import Any

import pandas
import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.eval.evaluate import readable_tokens
from kvfold.report.load import load_results
from kvfold.report.tables import to_csv
from tests.helpers.evaluation import Setting, own_questions


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


@pytest.mark.slow
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


@pytest.mark.parametrize("question_aware", [False, True])
def test_predictions_that_are_no_numbers_are_errors_and_no_wrong_answers(
    setting, tmp_path, question_aware
):
    model = copy.deepcopy(setting.model)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(KvfoldError, match=r"no sample has an answer: .*are no numbers"):
        kvfold.evaluate(
            model, setting.tokenizer, "jsonl", "full",
            data=own_questions(tmp_path / "own.jsonl"), question_aware=question_aware,
        )  # fmt: skip


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
    (tmp_path / "bad.jsonl").rename(tmp_path / "records.jsonl")
    with pytest.raises(KvfoldError, match=r"records\.jsonl is read, and would be overwritten"):
        run("jsonl", "full", data=tmp_path / "records.jsonl", out=tmp_path)


@pytest.mark.slow
def test_a_file_is_no_folder_of_results_and_windows_have_one_length(setting, tmp_path):
    file = tmp_path / "file"
    file.write_text("the quick brown fox " * 400)
    with pytest.raises(KvfoldError, match="cannot write into"):
        kvfold.evaluate(
            setting.model, setting.tokenizer, "kv_retrieval", "knorm", 0.5, samples=1, out=file
        )
    with pytest.raises(KvfoldError, match="continuation cuts its texts into windows of one length"):
        kvfold.evaluate(
            setting.model, setting.tokenizer, "continuation", "knorm", 0.5,
            data=file, samples=1, lengths=[32, 64],
        )  # fmt: skip
    twice = kvfold.evaluate(
        setting.model, setting.tokenizer, "continuation", "knorm", 0.5,
        data=file, samples=1, lengths=[32, 32],
    )  # fmt: skip
    assert all(record["samples"] == 1 for record in twice)


def test_the_limit_is_the_length_that_the_model_was_trained_for(setting, monkeypatch):
    before = readable_tokens(setting.model)
    scaled = copy.deepcopy(setting.model.config)
    scaled.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": scaled.max_position_embeddings,
    }  # fmt: skip
    monkeypatch.setattr(setting.model, "config", scaled)
    assert readable_tokens(setting.model) == 4 * before
