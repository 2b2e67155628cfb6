# SPDX-License-Identifier: Apache-2.0
"""The folder of contexts: named or private, odd files, full and lost disks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvfold
from kvfold import KvfoldError
from kvfold.contexts.files import write
from kvfold.contexts.files.format import read_header
from kvfold.hf.header import digest
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.context_pool import TOKENS, token_bytes
from kvfold.serve.errors import ApiError
from tests.helpers.contexts import QUESTION
from tests.helpers.held_contexts import counted, in_memory
from tests.helpers.serving import Running, running


def test_a_full_disk_keeps_what_is_in_memory(holder, made, monkeypatch):
    contexts = holder(1.5)
    contexts.add(made[0], "c0")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with pytest.raises(ApiError) as refused:
        contexts.add(made[1], "c1")
    assert refused.value.status_code == 503 and "/" not in str(refused.value.detail)
    assert in_memory(contexts) == ["c0"] and contexts.nbytes == counted(contexts)
    with contexts.reading("c0"):
        assert not contexts.get("c0").idle


def test_what_is_on_a_full_disk_already_makes_room(holder, made, monkeypatch):
    contexts = holder(2.5)
    for i in range(3):
        contexts.add(made[i], f"c{i}")
    with contexts.reading("c0"):
        pass
    # c1 went to the disk for c0; the oldest in memory, c2, was never written.
    assert in_memory(contexts) == ["c2", "c0"]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", full)
    with contexts.reading("c1") as read:
        assert torch.equal(read.ids, made[1].ids)
    assert in_memory(contexts) == ["c2", "c1"] and contexts.nbytes == counted(contexts)


def test_a_folder_that_is_only_read_says_so(holder, made, monkeypatch):
    contexts = holder(1.5)
    for i in range(2):
        contexts.add(made[i], f"c{i}")

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    file = contexts.folder.file("c0")
    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(KvfoldError, match=r"cannot write .*Read-only"):
        made[0].save(contexts.folder.path / "other.kvfold")
    for _ in range(2):
        with pytest.raises(ApiError, match="it stays") as stays:
            contexts.delete("c0")
        assert stays.value.status_code == 503 and str(file) not in stays.value.detail
    # Nothing is moved: c1 cannot be written.
    with pytest.raises(ApiError) as full, contexts.reading("c0"):
        pass
    assert full.value.status_code == 503 and contexts.nbytes == counted(contexts)
    monkeypatch.undo()
    with contexts.reading("c0"):
        contexts.delete("c0")
    assert not file.exists()


@pytest.mark.slow
def test_after_a_restart_contexts_are_found_by_their_texts(tmp_path):
    """The last token of these texts is another one before a blank line."""
    model, tokenizer = kvfold.bundled_model()
    texts = ("A list:\n- one\n- two\n", "The key is under the mat.\n")

    def read_before(server: Running) -> list[int]:
        answers = [server.chat(f"{text}\n\nWhere is the key?").json() for text in texts]
        return [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]

    with running(model, tokenizer, folder=tmp_path, method="knorm", budget=0.9) as server:
        for text in texts:
            server.create(text)
        found = read_before(server)
    assert all(found)
    with running(model, tokenizer, folder=tmp_path, method="knorm", budget=0.9) as server:
        assert not list(server.engine.contexts.adopt())
        assert read_before(server) == found
    # Of a file that another program wrote only the tokens are known.
    (file, _) = sorted(tmp_path.glob("*.kvfold"))
    kvfold.load(file, model, tokenizer).save(file)
    assert read_header(file).text is None
    with running(model, tokenizer, folder=tmp_path, method="knorm", budget=0.9) as server:
        assert not list(server.engine.contexts.adopt())
        assert sorted(read_before(server)) in ([0, count] for count in found)


def test_odd_files_are_left_out(holder, made, tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "dangling.kvfold").symlink_to(odd / "nothing")
    (odd / "folder.kvfold").mkdir()
    os.mkfifo(odd / "pipe.kvfold")
    (odd / f".kvfold-{'0' * 32}.tmp").symlink_to(odd / "nothing")
    text = "[" * 10**5
    deep = {"kvfold_context": "1", "header": text, "checksum": digest("1" + text)}
    save_file({"ids": torch.zeros(1)}, odd / "deep.kvfold", deep)
    made[0].save(odd / "good.kvfold")
    contexts = holder(5, folder=odd)
    problems = " ".join(str(problem) for problem in contexts.adopt())
    assert [held.id for held in contexts.all()] == ["good"]
    assert all(f"{name}.kvfold" in problems for name in ("dangling", "deep", "folder", "pipe"))


def test_where_memory_lacks_for_one_file_the_others_are_saved(holder, made, tmp_path, monkeypatch):
    contexts = holder(5, folder=tmp_path / "kept")
    for i in range(3):
        contexts.add(made[i], f"c{i}")
    save_all = write.save_file

    def short_of_memory(tensors: Any, file: Path, *rest: Any) -> None:
        if tensors["ids"].equal(made[0].ids[0]):
            raise torch.OutOfMemoryError("no room for a copy")
        save_all(tensors, file, *rest)

    monkeypatch.setattr(write, "save_file", short_of_memory)
    contexts.close()
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["c1.kvfold", "c2.kvfold"]


@pytest.mark.slow
def test_a_file_that_is_lost_or_altered_is_told(holder, made):
    contexts = holder(1.5)
    for i in range(2):
        contexts.add(made[i], f"c{i}")
    file = contexts.folder.file("c0")
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(ApiError, match="create it again") as gone, contexts.reading("c0"):
            pass
        assert gone.value.status_code == 410 and str(file) not in gone.value.detail
        assert contexts.nbytes == counted(contexts) and contexts.get("c0").idle
        file.unlink(missing_ok=True)
    contexts.delete("c0")


def test_a_named_folder_outlives_the_holder(holder, made, tmp_path):
    folder = tmp_path / "kept"
    contexts = holder(1.5, folder=folder)
    for i in range(3):
        contexts.add(made[i], f"c{i}")
    contexts.delete("c0")
    contexts.close()
    assert sorted(path.name for path in folder.iterdir()) == ["c1.kvfold", "c2.kvfold"]
    (folder / "broken.kvfold").write_bytes(b"broken")
    (folder / "No-Id.kvfold").write_bytes(b"other")
    again = holder(1.5, folder=folder)
    problems = list(again.adopt())
    assert "broken.kvfold" in str(problems[0])
    assert "rename it, 'No-Id' is no id" in str(problems[1]) and len(problems) == 2
    assert [held.id for held in again.all()] == ["c1", "c2"] and in_memory(again) == ["c2"]
    with again.reading("c1") as context:
        alone = made[1].ask(QUESTION, max_new_tokens=6)
        assert context.ask(QUESTION, max_new_tokens=6) == alone
    assert again.longest(TOKENS, token_bytes([*made[1].ids[0].tolist(), 5])).id == "c1"
    # What was not adopted is not written over.
    with pytest.raises(ApiError, match="already"):
        again.add(made[3], "broken")
    assert (folder / "broken.kvfold").read_bytes() == b"broken"


def test_a_private_folder_is_private_and_goes(holder, made):
    contexts = holder(1.5)
    path = contexts.folder.path
    for i in range(2):
        contexts.add(made[i])
    assert path.stat().st_mode & 0o777 == 0o700 and len(list(path.iterdir())) == 1
    contexts.close()
    assert not path.exists()


def test_what_a_killed_save_left_is_removed(tmp_path):
    old, new = (tmp_path / f".kvfold-{digit * 32}.tmp" for digit in "01")
    other = tmp_path / ".b.tmp"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    ContextFolder(tmp_path)
    assert not old.exists() and new.exists() and other.exists()


@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/b", "a.b", "A", "a\n", "a\0", "-a", "a" * 65]
)
def test_no_path_is_made_of_another_name(holder, made, name):
    with pytest.raises(KvfoldError, match="is no id"):
        holder(1).folder.file(name)
