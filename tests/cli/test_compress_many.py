# SPDX-License-Identifier: Apache-2.0
"""Several documents into files: each as if alone, once, and errors do not stop the others."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import kvfold
from kvfold.bundled import FOLDER
from kvfold.cli import app
from kvfold.contexts.files.format import read_header
from kvfold.fitted.of_model import read_fitted, write_fitted
from kvfold.jobs.compress import CompressJob, CompressOptions, compress_document
from kvfold.methods.stages.score.learned import Scorer
from tests.fitted.fitting.test_scorer import texts as fitted_on

TEXTS = {
    "bell": "The grass is green. " * 12 + "The special magic number for soft-bell is: 2241461.",
    "lamp": "The sky is blue. Here we go. " * 10,
}
HOW = ("--method", "snapkv:window=8", "--budget", "0.4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def held(path: Path) -> tuple[object, dict[str, list[object]]]:
    """The header and all numbers; the order of tensors in a file is not fixed."""
    return read_header(path), {k: v.tolist() for k, v in load_file(path).items()}


def command(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compress", "bundled", *map(str, words)])
    return done.exit_code, done.output


def test_each_file_is_that_of_its_document_alone(folder: Path) -> None:
    out = folder / "contexts"
    out.mkdir()
    documents = [folder / "bell.txt", folder / "lamp.txt"]
    how = ("--method", "snapkv:window=8", "--budget", "0.4", "--out", out)
    assert command(*documents, *how)[0] == 0
    model, tokenizer = kvfold.bundled_model()
    for name, text in TEXTS.items():
        alone = kvfold.compress(model, tokenizer, text, "snapkv:window=8", 0.4)
        alone.save(folder / "alone.kvfold")
        assert held(out / f"{name}.kvfold") == held(folder / "alone.kvfold")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    code, said = command(*documents, *how)
    assert code == 0 and "2 of 2 files are there already" in said
    later = before[out / "lamp.kvfold"] + 10**9
    os.utime(documents[1], ns=(later, later))
    assert command(*documents, *how)[0] == 0
    changed = {path.name for path in out.iterdir() if path.stat().st_mtime_ns != before[path]}
    assert changed == {"lamp.kvfold"}, "only the document that changed is read again"


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "knorm", "--budget", "0.4"), "instead of knorm"),
        (("--method", "snapkv:window=4", "--budget", "0.4"), "window=8"),
        (("--method", "snapkv:window=8", "--budget", "0.3"), "seen instead of 0.3"),
        (("--method", "snapkv:window=8", "--budget", "20"), "seen instead of 20 tokens"),
        ((*HOW, "--seed", "1"), "seed 0 instead of 1"),
        ((*HOW, "--prefill-chunk", "64", "--compress", "per_chunk"), "per_chunk None instead"),
        ((*HOW, "--keep-scores"), "keep_scores False instead of True"),
        ((*HOW, "--dtype", "bfloat16"), "holds float32"),
    ],
)
def test_a_file_that_was_made_in_another_way_is_not_taken_for_this_one(
    folder: Path, words: tuple[str, ...], said: str
) -> None:
    documents = folder / "bell.txt", folder / "lamp.txt"
    model, tokenizer = kvfold.bundled_model()
    kvfold.compress(model, tokenizer, TEXTS["bell"], "snapkv:window=8", 0.4).save(
        folder / "bell.kvfold"
    )
    before = (folder / "bell.kvfold").read_bytes()
    code, shown = command(*documents, *words, "--out", folder)
    assert code == 2 and "bell.kvfold" in shown and said in shown.splitlines()[-1], shown
    assert not (folder / "lamp.kvfold").exists()
    assert (folder / "bell.kvfold").read_bytes() == before
    assert command(*documents, *HOW, "--out", folder)[0] == 0


@pytest.mark.parametrize("ray", [(), ("--ray", "nowhere:1")])
@pytest.mark.parametrize("words", [("--special-tokens",), ("--encoding", "latin-1")])
def test_a_file_of_other_tokens_is_not_taken_for_this_one(
    folder: Path, words: tuple[str, ...], ray: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the tokens alone: with Ray before a cluster is sought, and a model loaded."""

    def never(*_: object) -> None:
        raise AssertionError("a cluster was sought")

    monkeypatch.setattr("kvfold.jobs.ray_cluster.cluster", never)
    documents = folder / "bell.txt", folder / "lamp.txt"
    documents[0].write_text("Café <|user|> " + TEXTS["bell"], encoding="utf-8")
    assert command(*documents, *HOW)[0] == 0
    before = (folder / "bell.kvfold").read_bytes()
    code, shown = command(*documents, *HOW, *words, *ray)
    said = shown.splitlines()[-1]
    assert code == 2 and "bell.kvfold is there already, made of other tokens" in said, shown
    assert (folder / "bell.kvfold").read_bytes() == before
    assert "2 of 2 files are there already" in command(*documents, *HOW)[1]


def test_a_file_of_another_fit_is_not_taken_for_this_one(folder: Path) -> None:
    documents, scorer = (folder / "bell.txt", folder / "lamp.txt"), folder / "z.safetensors"
    how = ("--method", f"zap:file={scorer}", "--budget", "0.4")
    model, tokenizer = kvfold.bundled_model()
    shutil.copy(FOLDER / "scorer.safetensors", scorer)
    assert command(*documents, *how)[0] == 0
    assert "2 of 2 files are there already" in command(*documents, *how)[1]
    fitted = read_fitted(scorer, model, Scorer)
    other = replace(fitted, weights=-fitted.weights)
    write_fitted(scorer, other, model, written_by="", target="kvzip", texts=0)
    code, shown = command(*documents, *how)
    assert code == 2 and "bell.kvfold is there already, made with fit zap " in shown
    for name in TEXTS:
        (folder / f"{name}.kvfold").unlink()
    assert command(*documents, *how)[0] == 0
    kvfold.load(folder / "bell.kvfold", model, tokenizer)


@pytest.mark.slow
def test_a_file_in_another_basis_is_not_taken_for_this_one(folder: Path) -> None:
    documents, basis = (folder / "bell.txt", folder / "lamp.txt"), folder / "basis.safetensors"
    for document in documents:
        document.write_text(document.read_text() * 8)
    how = ("--method", "full", "--codec", f"kvtc:file={basis},ratio=4")
    model, tokenizer = kvfold.bundled_model()
    kvfold.fit_codec(model, tokenizer, fitted_on(2), basis)
    assert command(*documents, *how)[0] == 0
    assert "2 of 2 files are there already" in command(*documents, *how)[1]
    kvfold.fit_codec(model, tokenizer, fitted_on(3), basis)
    code, shown = command(*documents, *how)
    assert code == 2 and "bell.kvfold is there already, made with basis " in shown


def test_a_file_of_another_model_is_not_taken_for_this_one_s(folder: Path) -> None:
    model, tokenizer = kvfold.bundled_model()
    with torch.no_grad():
        next(model.parameters()).neg_()
    kvfold.compress(model, tokenizer, TEXTS["bell"], "snapkv:window=8", 0.4).save(
        folder / "bell.kvfold"
    )
    documents = folder / "bell.txt", folder / "lamp.txt"
    code, shown = command(*documents, *HOW, "--out", folder)
    assert code == 2 and "bell.kvfold was made with another model" in shown
    (folder / "bell.kvfold").write_text("no context")
    code, shown = command(*documents, *HOW, "--out", folder)
    assert code == 2 and "bell.kvfold" in shown
    assert not (folder / "lamp.kvfold").exists()


def test_one_that_cannot_be_compressed_is_said_and_the_others_are(folder: Path) -> None:
    method = kvfold.parse("snapkv:window=8")
    options = CompressOptions(method, kvfold.Budget.of(16), None, "at_end", 0)
    model, tokenizer = kvfold.bundled_model()
    found = [
        compress_document(model, tokenizer, CompressJob(TEXTS["bell"], folder / place, options))
        for place in ("nowhere/bell.kvfold", "bell.kvfold")
    ]
    assert found[0].stats is None and "nowhere" in str(found[0].why)
    assert found[1].stats is not None and found[1].why is None
    assert kvfold.load(folder / "bell.kvfold", model, tokenizer).stats().kept[0][0][0] == 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bell.txt", "bell.txt"), "several documents would become"),
        (("bell.txt", "lamp.txt", "--out", "nowhere"), "there is no such folder"),
        (("bell.txt", "none.txt"), "cannot read"),
    ],
)
def test_what_cannot_be_begun_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(folder)
    code, shown = command(*words, "--budget", "0.4")
    assert code == 2 and said in shown
    assert not list(folder.glob("*.kvfold"))


def test_scores_that_a_method_keeps_for_itself_are_no_option(folder: Path) -> None:
    documents = folder / "bell.txt", folder / "lamp.txt"
    how = ("--method", "scissorhands_kvcf:window=8", "--budget", "0.4")
    assert command(*documents, *how)[0] == 0
    assert any("scores" in layer.by_head for layer in read_header(folder / "bell.kvfold").layers)
    assert "2 of 2 files are there already" in command(*documents, *how)[1]
