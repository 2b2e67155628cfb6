# SPDX-License-Identifier: Apache-2.0
"""Contexts of recall on disk: what stays in the file, damage, and files that change meanwhile."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvfold
from kvfold import ContextFileError
from kvfold.contexts.files.cold_rows import BLOCK, FileRows, HeldFile, sums_of
from kvfold.contexts.files.format import FORMAT, VERSION, opened
from kvfold.errors import CodecRefusal
from kvfold.kernels.native import files as native
from kvfold.store.ragged import RaggedStore
from tests.helpers.contexts import DOCUMENT, KINDS, QUESTION, assert_same, compressed

SPECS = ["recall:residual=8,read=0.2", "snapkv + recall:residual=8,read=0.2"]


def saved(model: Any, tokenizer: Any, path: Path, spec: str = SPECS[0]) -> Any:
    context = compressed(model, tokenizer, spec)
    context.save(path)
    return context


def aged(path: Path) -> None:
    """Lets the file look old: a write within the same tick of the clock could not be seen."""
    os.utime(path, (1, 1))


def flip(path: Path, name: str, row: int) -> None:
    """Changes one byte of a row of a tensor of a file, in place."""
    first, _, size, dtype = HeldFile(path, path).tensor(name)
    with path.open("r+b") as file:
        file.seek(first + row * size * dtype.itemsize)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("spec", SPECS)
def test_entries_stay_in_the_file_and_answers_are_the_same(model, tokenizer, tmp_path, spec):
    context = saved(model, tokenizer, tmp_path / "a.ctx", spec)
    loaded = kvfold.load(tmp_path / "a.ctx", model, tokenizer)
    before, after = context.cache.stats(), loaded.cache.stats()
    assert after.cold == (0, before.cold.host, 0) and before.cold.host > 0
    assert after.kv_bytes == before.kv_bytes
    assert loaded.ask(QUESTION) == context.ask(QUESTION)
    read = loaded.cache.stats().cold.read
    assert 0 < read == context.cache.stats().cold.read
    assert_same(loaded.cache, context.cache)


def test_saved_again_and_loaded_in_part(model, tokenizer, tmp_path):
    saved(model, tokenizer, tmp_path / "a.ctx")
    loaded = kvfold.load(tmp_path / "a.ctx", model, tokenizer)
    loaded.save(tmp_path / "b.ctx")
    assert (tmp_path / "a.ctx").read_bytes() == (tmp_path / "b.ctx").read_bytes()
    with safe_open(tmp_path / "a.ctx", framework="pt") as file:
        assert file.metadata()[FORMAT] == VERSION
    part = kvfold.load(tmp_path / "a.ctx", model, tokenizer, heads=slice(1, 2))
    for mine, whole in zip(part.cache.states, loaded.cache.states, strict=True):
        for own, every in zip(mine.stored().dense(), whole.stored().dense(), strict=True):
            assert torch.equal(own, every[:, 1:2])


def test_a_damaged_block_is_named_when_it_is_read(model, tokenizer, tmp_path):
    path = tmp_path / "a.ctx"
    saved(model, tokenizer, path)
    flip(path, "layers.2.values.cold.1", 70)
    loaded = kvfold.load(path, model, tokenizer)  # it reads no entry
    with pytest.raises(
        ContextFileError, match=r"layers\.2\.values\.cold\.1 was altered in rows 64"
    ):
        loaded.ask(QUESTION)
    with opened(path) as file, pytest.raises(ContextFileError, match="was altered"):
        file.check()


def test_a_replaced_file_keeps_its_reader_and_one_cut_short_is_refused(model, tokenizer, tmp_path):
    path, other = tmp_path / "a.ctx", tmp_path / "b.ctx"
    context = saved(model, tokenizer, path)
    answer = context.ask(QUESTION)
    shutil.copy(path, other)
    loaded, cut = (kvfold.load(each, model, tokenizer) for each in (path, other))
    compressed(model, tokenizer, "full").save(path)
    assert loaded.ask(QUESTION) == answer
    path.unlink()
    assert loaded.ask(QUESTION) == answer
    os.truncate(other, 20_000)
    with pytest.raises(ContextFileError, match="cut short"):
        cut.ask(QUESTION)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists what is mapped")
@pytest.mark.parametrize("spec", [*SPECS, "recall:residual=0,sinks=0"])
def test_nothing_of_a_loaded_file_stays_mapped(model, tokenizer, tmp_path, spec):
    path = tmp_path / "mapped.ctx"
    kvfold.compress(model, tokenizer, DOCUMENT, spec, KINDS.get(spec, (None,))[0]).save(path)
    loaded = kvfold.load(path, model, tokenizer)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, 4096)
    with pytest.raises(ContextFileError, match="cut short"):
        loaded.ask(QUESTION)


@pytest.mark.parametrize("read_before", [True, False])
def test_a_file_that_was_written_to_is_refused(model, tokenizer, tmp_path, read_before):
    path, other = tmp_path / "a.ctx", tmp_path / "b.ctx"
    saved(model, tokenizer, path)
    aged(path)
    loaded = kvfold.load(path, model, tokenizer)
    if read_before:
        loaded.ask(QUESTION)  # all blocks that it asks for are checked
    text = " ".join(reversed(DOCUMENT.split()))
    kvfold.compress(model, tokenizer, text, SPECS[0]).save(other)
    path.write_bytes(other.read_bytes())
    with pytest.raises(ContextFileError, match="written to after it was loaded"):
        loaded.ask(QUESTION)
    assert kvfold.load(path, model, tokenizer).ask(QUESTION)


@pytest.mark.parametrize("in_cpp", [True, False])
def test_rows_altered_after_they_were_checked_are_refused(tmp_path, monkeypatch, in_cpp):
    if not in_cpp:
        monkeypatch.setattr(native, "library", lambda: None)
    path, tensor = tmp_path / "rows", torch.randn(BLOCK, 8)
    save_file({"a": tensor}, path)
    aged(path)
    rows = FileRows.of(HeldFile(path, path), ["a"], [sums_of(tensor)])
    assert torch.equal(rows.segment(0), tensor)
    path.chmod(0o600)
    os.link(path, tmp_path / "linked")
    path.unlink()
    assert torch.equal(rows.segment(0), tensor)
    flip(tmp_path / "linked", "a", 3)
    with pytest.raises(ContextFileError, match="written to after it was loaded"):
        rows.segment(0)


def test_a_pickled_cache_holds_the_entries_of_its_file(model, tokenizer, tmp_path):
    context = saved(model, tokenizer, tmp_path / "a.ctx")
    loaded = kvfold.load(tmp_path / "a.ctx", model, tokenizer)
    pickled = pickle.dumps(loaded.cache)
    (tmp_path / "a.ctx").unlink()
    again = pickle.loads(pickled)
    assert again.stats().cold[:2] == context.cache.stats().cold[:2]
    assert_same(again, context.cache)


@pytest.mark.parametrize("codec", ["zstd", "kivi4"])
def test_codecs_are_refused(model, tokenizer, tmp_path, codec):
    context = compressed(model, tokenizer, SPECS[0])
    with pytest.raises(CodecRefusal, match="one by one"):
        context.save(tmp_path / "a.ctx", codec=codec)
    assert not (tmp_path / "a.ctx").exists()


def test_later_tokens_are_in_memory_beside_the_file(model, tokenizer, tmp_path):
    context = saved(model, tokenizer, tmp_path / "a.ctx")
    loaded = kvfold.load(tmp_path / "a.ctx", model, tokenizer)
    ids = torch.arange(3, 12).repeat(9)[None]
    for each in (loaded, context):
        for token in ids.split(1, 1):
            each.model(token, past_key_values=each.cache)
    stats = loaded.cache.stats()
    assert stats.cold.filed and stats.cold.host
    assert sum(stats.cold[:2]) == context.cache.stats().cold.host
    store = loaded.cache.states[0].stored()
    assert isinstance(store, RaggedStore)
    assert_same(loaded.cache, context.cache)


def test_a_block_is_checked_once_for_all_selections(tmp_path, monkeypatch):
    path, tensors = tmp_path / "rows", {"a": torch.randn(2 * BLOCK, 8), "b": torch.randn(5, 8)}
    save_file(tensors, path)
    rows = FileRows.of(HeldFile(path, path), ["a", "b"], list(map(sums_of, tensors.values())))
    checked, check = [], FileRows._check
    monkeypatch.setattr(FileRows, "_check", lambda *args: [checked.append(args[1:]), check(*args)])
    rows.at(torch.tensor([1, 0]), torch.tensor([2, 70]))
    other = rows.select([1, 0, 0])
    assert torch.equal(other.segment(1), tensors["a"])
    for i, name in enumerate("ab"):
        assert torch.equal(rows.segment(i), tensors[name])
    assert checked == [(0, 1), (1, 0), (1, 0)]  # the last one is of the selection's segment 1


def test_a_file_system_may_give_less_at_once(tmp_path, monkeypatch):
    path, tensor, whole = tmp_path / "rows", torch.randn(BLOCK, 8), os.pread
    save_file({"a": tensor}, path)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(os, "pread", lambda file, count, at: whole(file, min(count, 7), at))
    rows = FileRows.of(HeldFile(path, path), ["a"], [sums_of(tensor)])
    assert torch.equal(rows.segment(0), tensor)


@pytest.mark.parametrize("in_cpp", [True, False])
def test_rows_are_those_of_the_tensor(tmp_path, monkeypatch, in_cpp):
    if not in_cpp:
        monkeypatch.setattr(native, "library", lambda: None)
    tensors = {"a": torch.randn(2 * BLOCK + 3, 8), "b": torch.randn(5, 8), "c": torch.randn(0, 8)}
    path = tmp_path / "rows"
    save_file(tensors, path)
    sums = [sums_of(rows) for rows in tensors.values()]
    rows = FileRows.of(HeldFile(path, path), list(tensors), sums)
    segments, places = torch.tensor([0, 1, 0, 0]), torch.tensor([130, 4, 0, 64])
    expected = torch.stack([tensors["ab"[i]][at] for i, at in zip(segments, places, strict=True)])
    assert torch.equal(rows.at(segments, places), expected)
    assert [rows.segment(i).tolist() for i in range(3)] == [t.tolist() for t in tensors.values()]
    other = rows.select([1, 0])
    assert other.lengths == [5, 131] and torch.equal(other.segment(0), tensors["b"])
    assert rows.nbytes() == (0, 136 * 32, 0)
    with pytest.raises(ValueError, match="do not fit"):
        FileRows.of(HeldFile(path, path), list(tensors), sums[::-1])
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(ContextFileError, match="cut short"):
        FileRows.of(HeldFile(path, path), ["a", "b"], sums[:2]).segment(1)
