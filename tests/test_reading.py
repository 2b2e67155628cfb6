# SPDX-License-Identifier: Apache-2.0
"""Only regular files are read: opening a pipe would wait, and a device may never end."""

import os
from pathlib import Path

import pytest

import kvfold
from kvfold.cli.options import read_text as read_document
from kvfold.fitted.file import digest_of_file, read_scorer_file, read_table
from kvfold.generation.head_scores import read_head_scores
from kvfold.reading import opened_regular
from kvfold.report.load import load_results
from tests.helpers.commands import refused


def test_a_regular_file_is_read_and_others_are_named(tmp_path):
    file, pipe, link = tmp_path / "file", tmp_path / "pipe", tmp_path / "link"
    file.write_bytes(b"text")
    link.symlink_to(file)
    os.mkfifo(pipe)
    for path in (file, link, str(file)):
        with opened_regular(path) as opened:
            assert opened.read() == b"text"
    held = len(os.listdir("/dev/fd")) if Path("/dev/fd").is_dir() else 0
    for path, what in ((pipe, "a pipe"), (tmp_path, "a folder"), (Path(os.devnull), "a device")):
        with pytest.raises(OSError, match=f"it is {what}"), opened_regular(path):
            pytest.fail("it was opened")
    assert not held or len(os.listdir("/dev/fd")) == held


def named(path: Path, suffix: str) -> Path:
    made = path / f"pipe{suffix}"
    os.mkfifo(made)
    return made


def test_no_reader_of_a_named_file_waits_for_a_pipe(tmp_path):
    model, tokenizer = kvfold.bundled_model()
    tensors, table, module = (named(tmp_path, each) for each in (".safetensors", ".tsv", ".py"))
    numbers, questions, jsonl = (named(tmp_path, each) for each in (".json", ".txt", ".jsonl"))
    readers = [
        lambda: read_scorer_file(tensors),
        lambda: digest_of_file(tensors),
        lambda: read_table(table),
        lambda: read_head_scores(str(tensors)),
        lambda: kvfold.compress(model, tokenizer, "a text", f"zap:file={tensors}", 0.5),
        lambda: kvfold.compress(model, tokenizer, "a text", f"snapkv + sizes:file={numbers}", 0.5),
        lambda: kvfold.compress(model, tokenizer, "a text", f"duo:file={table}", 0.5),
        lambda: kvfold.compress(model, tokenizer, "a text", f"kvzip:questions={questions}", 0.5),
        lambda: kvfold.load(tensors, model, tokenizer),
        lambda: load_results([jsonl]),
    ]
    for read in readers:
        with pytest.raises(kvfold.KvfoldError):
            read()
    assert "it is a pipe" in refused("methods", "--import", str(module))
    refused("fit", "bundled", "text.txt", "--codec", f"kvtc:file={tensors}", "--out", "x")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no devices")
def test_a_device_is_no_document_and_a_pipe_is(tmp_path):
    with pytest.raises(kvfold.KvfoldError, match="cannot read /dev/zero: it is a device"):
        read_document(Path("/dev/zero"))
    ends = os.pipe()
    os.write(ends[1], b"a text from another program")
    os.close(ends[1])
    assert read_document(Path(f"/dev/fd/{ends[0]}")) == "a text from another program"
    os.close(ends[0])
