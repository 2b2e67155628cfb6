# SPDX-License-Identifier: Apache-2.0
"""Placeholders: tokens that most heads keep, salts, ids of files that are there."""

from __future__ import annotations

import os
import weakref

import pytest
import torch
from safetensors.torch import save_file

import kvfold
from kvfold import ContextFileError, KvfoldError
from kvfold.contexts.files.format import CHECKSUM, FORMAT, HEADER, VERSION
from kvfold.hf.header import digest
from kvfold.serve.vllm.placeholders import ServedFolder, UnknownContext
from tests.helpers.contexts import DOCUMENT, forged, rewritten


def test_placeholders_are_tokens_that_most_heads_keep(model, tokenizer, served_folder):
    context = kvfold.load(served_folder.path("even"), model, tokenizer)
    heads = [set(row.tolist()) for i in range(4) for row in context.cache.positions(i)[0]]
    votes = {p: sum(p in head for head in heads) for head in heads for p in head}
    chosen = sorted(sorted(votes, key=lambda p: (-votes[p], p))[:40])
    assert served_folder.get("even").tokens == context.ids[0, chosen].tolist()


def test_salts_tell_contexts_and_versions_apart(model, tokenizer, tmp_path):
    served_folder, path = ServedFolder(tmp_path), tmp_path / "a.kvfold"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path)
    first = served_folder.get("a")
    assert served_folder.get("a") is first
    (tmp_path / "b.kvfold").write_bytes(path.read_bytes())
    assert served_folder.get("b").salt == first.salt
    kvfold.compress(model, tokenizer, DOCUMENT, "h2o", 40).save(path)
    second = served_folder.get("a")
    assert second.salt != first.salt and second.salt.startswith("kvfold:")
    assert served_folder.ids() == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "../even", "even.kvfold", "", "/etc/x", None, 5, "Even"])
def test_only_ids_of_files_that_are_there_are_known(served_folder, name):
    with pytest.raises(UnknownContext):
        served_folder.get(name)


def test_a_file_that_goes_away_meanwhile_is_unknown(tmp_path, monkeypatch):
    served_folder = ServedFolder(tmp_path)
    monkeypatch.setattr(served_folder, "path", lambda name: tmp_path / "gone.kvfold")
    with pytest.raises(UnknownContext, match="any more"):
        served_folder.get("gone")


def test_a_damaged_file_is_refused(served_folder, tmp_path):
    data = bytearray(served_folder.path("even").read_bytes())
    (tmp_path / "cut.kvfold").write_bytes(data[:-9])
    with pytest.raises(ContextFileError):
        ServedFolder(tmp_path).get("cut")


def test_odd_files_are_refused_one_by_one(served_folder, tmp_path):
    """A dangling link, a pipe, a folder, and a header that is nested too deep to be parsed."""
    (tmp_path / "dangling.kvfold").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.kvfold")
    (tmp_path / "folder.kvfold").mkdir()
    deep = "[" * 10**5
    about = {FORMAT: VERSION, HEADER: deep, CHECKSUM: digest(VERSION + deep)}
    save_file({"ids": torch.zeros(1)}, tmp_path / "deep.kvfold", about)
    (tmp_path / "fine.kvfold").write_bytes(served_folder.path("even").read_bytes())
    folder = ServedFolder(tmp_path)
    assert folder.ids() == ["dangling", "deep", "fine", "folder", "pipe"]
    for name in ("dangling", "pipe", "folder"):
        with pytest.raises(UnknownContext):
            folder.get(name)
    with pytest.raises(ContextFileError):
        folder.get("deep")
    assert folder.get("fine").kept == 40


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(KvfoldError, match="no folder"):
        ServedFolder(tmp_path / "none")


CONTRADICTIONS = {
    "no layers": {"layers": []},
    "few tokens": {"seen": 3},
    "less than no token": {"seen": -1},
    "more tokens than memory": {"seen": 2**50},
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_told_as_damage(served_folder, tmp_path, what):
    """Any other exception would end vLLM's engine."""
    rewritten(tmp_path / "odd.kvfold", served_folder.path("even"), **CONTRADICTIONS[what])
    with pytest.raises(ContextFileError, match="damaged"):
        ServedFolder(tmp_path).get("odd")


def test_few_token_ids_are_told_as_damage(served_folder, tmp_path):
    forged(tmp_path / "odd.kvfold", served_folder.path("even"), "ids", torch.zeros(2, dtype=int))
    with pytest.raises(ContextFileError, match="damaged"):
        ServedFolder(tmp_path).get("odd")


def test_files_that_are_gone_take_no_memory(served_folder, tmp_path):
    folder, weak = ServedFolder(tmp_path), []
    for name in "abc":
        (tmp_path / f"{name}.kvfold").write_bytes(served_folder.path("even").read_bytes())
        weak.append(weakref.ref(folder.get(name)))
        if name != "b":
            (tmp_path / f"{name}.kvfold").unlink()
    assert [each() is None for each in weak] == [True, False, False]
