# SPDX-License-Identifier: Apache-2.0
"""Placeholders: tokens that most heads keep, salts, ids of files that are there."""

from __future__ import annotations

import pytest

import kvfold
from kvfold import ContextFileError, KvfoldError
from kvfold.serve.vllm.placeholders import ServedFolder, UnknownContext
from tests.helpers.contexts import DOCUMENT


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


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(KvfoldError, match="no folder"):
        ServedFolder(tmp_path / "none")
