# SPDX-License-Identifier: Apache-2.0
"""Writing a context file: an error or a kill leaves the old one; rights; many savers at once."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save as as_bytes

import kvfold
from kvfold import KvfoldError
from kvfold.contexts.files import write
from kvfold.contexts.files.format import opened
from kvfold.methods.base import preset
from tests.helpers.contexts import DOCUMENT, assert_same, compressed, same, state


def test_nothing_is_shared_with_the_file_or_with_another_load(model, tokenizer, saved):
    one, other = (kvfold.load(saved, model, tokenizer) for _ in range(2))
    before = copy.deepcopy(state(other.cache.states[0]))
    for tensors in one.cache.states[0].stored().named().values():
        for tensor in tensors:
            tensor.zero_()
    assert all(same(before[k], v) for k, v in state(other.cache.states[0]).items())
    assert_same(kvfold.load(saved, model, tokenizer).cache, other.cache)


@pytest.mark.slow
@pytest.mark.parametrize("text", [DOCUMENT, 'Ünï\u2028 "\\/" \x01\x7f \b\f\n\r\t 😀 ' * 9])
def test_equal_contexts_give_equal_files(model, tokenizer, text, tmp_path):
    path = tmp_path / "a.kvfold"
    context = kvfold.compress(model, tokenizer, text, "snapkv:window=4", 0.5)
    files = set()
    for _ in range(12):
        context.save(path)
        files.add(path.read_bytes())
    assert len(files) == 1
    assert_same(kvfold.load(path, model, tokenizer).cache, context.cache)


def test_an_error_while_writing_leaves_the_old_file(model, tokenizer, saved, tmp_path, monkeypatch):
    path = tmp_path / "a.kvfold"
    path.write_bytes(saved.read_bytes())
    context = compressed(model, tokenizer, "snapkv")

    def half(tensors: Any, temporary: Path, header: Any) -> None:
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "save_file", half)
    with pytest.raises(KvfoldError, match=r"cannot write .*No space left"):
        context.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["a.kvfold"]


KILLED = """
import sys, time
from pathlib import Path
from kvfold.writing import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.kvfold"
    path.write_bytes(b"old")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert path.read_bytes() == b"old"
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".kvfold", ".tmp"]


def test_a_file_that_is_replaced_keeps_the_usual_rights(model, tokenizer, tmp_path):
    path, usual = tmp_path / "a.kvfold", tmp_path / "usual"
    usual.touch()
    compressed(model, tokenizer, "snapkv").save(path)
    assert path.stat().st_mode == usual.stat().st_mode


def test_only_context_files_are_replaced(model, tokenizer, tmp_path):
    made, path = compressed(model, tokenizer, "snapkv"), tmp_path / "a"
    session = kvfold.begin_session(model, tokenizer, DOCUMENT, "snapkv:window=4", 300)
    others = {"a text on kvfold": b"kvfold_context", "weights": as_bytes({"a": torch.zeros(2)})}
    others["of another kind"] = as_bytes({"a": torch.zeros(2)}, {"kvfold_scorer": "1"})
    others["no header"] = (1 << 60).to_bytes(8, "little") + b"{" * 5000
    others["no object"] = (9).to_bytes(8, "little") + b"{" * 9
    for content in others.values():
        path.write_bytes(content)
        for one in (made, session):
            with pytest.raises(KvfoldError, match="a is not of kvfold, or is no context file"):
                one.save(path)
        assert path.read_bytes() == content
    path.write_bytes(b"")
    made.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])  # its own, damaged
    made.save(path)
    assert path.read_bytes() == whole
    session.save(path)
    made.save(path, codec="kivi4")


def test_no_folder_is_made(model, tokenizer, tmp_path):
    with pytest.raises(KvfoldError, match="cannot write"):
        compressed(model, tokenizer, "snapkv").save(tmp_path / "none" / "a.kvfold")


@dataclass(frozen=True)
class Unregistered(type(preset("snapkv"))):  # type: ignore[misc]
    name: ClassVar[str] = "snapkv"


def test_what_could_not_be_loaded_is_not_saved(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    context = kvfold.compress(model, tokenizer, DOCUMENT, Unregistered(), 40)
    with pytest.raises(KvfoldError, match="is not a registered method"):
        context.save(path)
    context = compressed(model, tokenizer, "snapkv")
    with pytest.raises(KvfoldError, match=r"has read \d+ tokens, and the context has 1:"):
        dataclasses.replace(context, ids=context.ids[:, :1]).save(path)
    with context.cache.frozen(), pytest.raises(KvfoldError, match="in the middle of a turn"):
        context.save(path)
    context.cache.batch_repeat_interleave(2)
    with pytest.raises(KvfoldError, match="several rows"):
        context.save(path)
    context.cache.reset()
    with pytest.raises(KvfoldError, match="nothing to save"):
        context.save(path)
    assert not path.exists()


def test_savers_and_readers_of_one_name_never_disturb_each_other(model, tokenizer, tmp_path):
    path, done = tmp_path / "a.kvfold", Event()
    both = [kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", n) for n in (40, 90)]
    both[0].save(path)

    def replaced() -> None:
        while not done.is_set():
            for context in both:
                context.save(path)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(replaced)
        try:
            for _ in range(60):
                with opened(path) as file:
                    file.check()
        finally:
            done.set()
        saving.result()


def test_a_file_keeps_its_rights(model, tokenizer, tmp_path):
    path = tmp_path / "a.kvfold"
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(path)
    path.chmod(0o600)
    context.save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_names_as_long_as_the_file_system_takes_are_written(model, tokenizer, tmp_path):
    path = tmp_path / ("a" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 7) + ".kvfold")
    compressed(model, tokenizer, "snapkv").save(path)
    assert kvfold.load(path, model, tokenizer).stats().seen
