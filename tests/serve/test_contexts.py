# SPDX-License-Identifier: Apache-2.0
"""What holds contexts: the cap, what goes to disk and comes back, and who waits for whom."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import kvfold
from kvfold import KvfoldError
from kvfold.cache.layer import CompressedLayer
from kvfold.contexts.files import write
from kvfold.contexts.files.format import digest
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.context_pool import TEXT, TOKENS, ContextPool, token_bytes
from kvfold.serve.errors import ApiError
from kvfold.serve.longest_prefix import PrefixIndex, PrefixKey
from kvfold.serve.stored_context import size_of
from tests.helpers.chats import storages
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.serving import until
from tests.helpers.tokenizers import word_tokenizer

DOCUMENTS = [" ".join(random.Random(i).sample(DOCUMENT.split(), 120)) for i in range(6)]


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def made(model: Any, tokenizer: Any) -> list[kvfold.Context]:
    return [kvfold.compress(model, tokenizer, text, "snapkv", 40) for text in DOCUMENTS]


@pytest.fixture
def holder(model: Any, tokenizer: Any, made: Any, tmp_path: Path) -> Iterator[Any]:
    """Makes a holder with room for so many contexts."""
    load = partial(kvfold.load, model=model, tokenizer=tokenizer)
    holders = []

    def new(room: float, most: int = 100, folder: Path | None = None) -> ContextPool:
        holders.append(ContextPool(load, ContextFolder(folder), int(room * size_of(made[0])), most))
        return holders[-1]

    yield new
    for one in holders:
        one.folder.close()


def in_memory(contexts: ContextPool) -> list[str]:
    return [held.id for held in contexts.all() if held.context is not None]


def counted(contexts: ContextPool) -> int:
    """Bytes of what is in memory, by its own tensors."""
    with contexts._changed:  # what is there at one moment, while other threads read and move
        there = [held.context for held in contexts._held.values() if held.context is not None]
    return sum(map(size_of, there))


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("spec", ["snapkv", "adakv", "streaming_llm"])
def test_the_size_is_that_of_every_tensor(tokenizer, family, spec):
    context = kvfold.compress(new_model(family), tokenizer, DOCUMENT, spec, 40)
    own = [
        layer if isinstance(layer, CompressedLayer) else vars(layer)
        for layer in context.cache.layers
    ]
    reachable = sum(storages([own, context.ids, context.cache.history], {}, set()).values())
    assert size_of(context) == pytest.approx(reachable, rel=0.02)


def test_the_least_recently_used_go_to_disk_and_come_back(holder, made):
    contexts = holder(2.5)
    alone = [context.ask(QUESTION, max_new_tokens=6) for context in made]
    for i in range(3):
        contexts.add(made[i], f"c{i}")
    assert in_memory(contexts) == ["c1", "c2"] and contexts.to_disk == 1
    with contexts.reading("c1"):
        pass
    with contexts.reading("c0") as context:
        assert context is not made[0]
        assert context.ask(QUESTION, max_new_tokens=6) == alone[0]
    assert in_memory(contexts) == ["c1", "c0"]
    files = [path.name for path in contexts.folder.path.iterdir()]
    assert sorted(files) == ["c0.kvfold", "c2.kvfold"]
    assert contexts.nbytes == counted(contexts) <= contexts.memory
    for i in range(3):
        contexts.delete(f"c{i}")
    assert contexts.nbytes == 0 and not list(contexts.folder.path.iterdir())
    assert not any(prefixes._named for prefixes in contexts._prefixes.values())


def test_a_context_is_written_once(holder, made, monkeypatch):
    contexts, saves = holder(1.5), []
    whole = kvfold.Context.save
    monkeypatch.setattr(
        kvfold.Context, "save", lambda self, path: (saves.append(path.name), whole(self, path))
    )
    for i in range(2):
        contexts.add(made[i], f"c{i}")
    for i in (0, 1, 0, 1):
        with contexts.reading(f"c{i}"):
            assert in_memory(contexts) == [f"c{i}"]
    assert sorted(saves) == ["c0.kvfold", "c1.kvfold"] and contexts.to_memory == 4


@pytest.mark.slow
def test_many_readers_never_pass_the_cap(holder, made):
    contexts, taken = holder(2.2), []
    alone = [context.ask(QUESTION, max_new_tokens=4) for context in made]
    for i, context in enumerate(made):
        contexts.add(context, f"c{i}")

    def ask(i: int) -> bool:
        with contexts.reading(f"c{i}") as context:
            answer = context.ask(QUESTION, max_new_tokens=4)
            taken.extend((contexts.nbytes, counted(contexts)))
        return answer == alone[i]

    order = [random.Random(i).randrange(len(made)) for i in range(60)]
    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(ask, order))
    assert 0 < max(taken) <= contexts.memory
    assert contexts.nbytes == counted(contexts) and contexts.to_memory > 5
    assert all(held.idle for held in contexts.all())


def test_contexts_that_are_added_wait_for_readers(holder, made):
    contexts = holder(1.5)
    contexts.add(made[0], "c0")
    with ThreadPoolExecutor(1) as pool:
        with contexts.reading("c0"):
            adding = pool.submit(contexts.add, made[1], "c1")
            time.sleep(0.05)
            assert not adding.done() and in_memory(contexts) == ["c0"]
        assert adding.result(10).id == "c1"
    assert in_memory(contexts) == ["c1"]


def test_a_context_beyond_the_cap_is_refused(holder, made):
    contexts = holder(0.5)
    with pytest.raises(ApiError, match="choose a smaller budget") as refused:
        contexts.add(made[0])
    assert refused.value.status_code == 413 and contexts.nbytes == 0 and contexts.all() == []


def test_so_many_contexts_and_no_more(holder, made):
    contexts = holder(5, most=2)
    for i in range(2):
        contexts.add(made[i])
    with pytest.raises(ApiError, match="delete one") as refused:
        contexts.add(made[2])
    assert refused.value.status_code == 429 and len(contexts.all()) == 2
    contexts.delete(contexts.all()[0].id)
    contexts.add(made[2])


# --- deleted while in use ------------------------------------------------------------------------


def test_a_context_that_is_read_goes_when_its_readers_end(holder, made):
    contexts = holder(1.5)
    size = contexts.add(made[0], "c0").size
    contexts.add(made[1], "c1")
    with contexts.reading("c0"), contexts.reading("c0") as context:
        contexts.delete("c0")
        with pytest.raises(ApiError, match="no context 'c0'"):
            contexts.get("c0")
        with pytest.raises(ApiError, match="already"):
            contexts.check_new("c0")
        assert context.ask(QUESTION, max_new_tokens=2) is not None
        assert contexts.nbytes == size and contexts.folder.file("c0").exists()
    assert contexts.nbytes == 0 and not contexts.folder.file("c0").exists()
    contexts.add(made[0], "c0")


def test_a_context_deleted_while_it_is_written_leaves_nothing(holder, made, monkeypatch):
    contexts, writing, go = holder(1.5), Event(), Event()
    whole = kvfold.Context.save

    def slowly(self: Any, path: Path) -> None:
        writing.set()
        assert go.wait(10)
        whole(self, path)

    monkeypatch.setattr(kvfold.Context, "save", slowly)
    contexts.add(made[0], "c0")
    with ThreadPoolExecutor(2) as pool:
        adding = pool.submit(contexts.add, made[1], "c1")
        assert writing.wait(10)
        # Who reads meanwhile waits, and whoever asks what is held does not.
        assert len(contexts.all()) == 1 and contexts.get("c0").moving
        contexts.delete("c0")
        go.set()
        adding.result(10)
    assert in_memory(contexts) == ["c1"] and not contexts._deleted
    assert not list(contexts.folder.path.iterdir()) and contexts.nbytes == counted(contexts)


# --- a disk that fails ---------------------------------------------------------------------------


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


def test_odd_files_are_left_out(holder, made, tmp_path):
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "dangling.kvfold").symlink_to(odd / "nothing")
    (odd / "folder.kvfold").mkdir()
    os.mkfifo(odd / "pipe.kvfold")
    (odd / f".a.kvfold.{'0' * 32}.tmp").symlink_to(odd / "nothing")
    text = "[" * 10**5
    deep = {"kvfold_context": "1", "header": text, "checksum": digest("1" + text)}
    save_file({"ids": torch.zeros(1)}, odd / "deep.kvfold", deep)
    made[0].save(odd / "good.kvfold")
    contexts = holder(5, folder=odd)
    problems = " ".join(str(problem) for problem in contexts.adopt())
    assert [held.id for held in contexts.all()] == ["good"]
    assert all(f"{name}.kvfold" in problems for name in ("dangling", "deep", "folder", "pipe"))


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


# --- the folder ----------------------------------------------------------------------------------


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
    assert len(problems) == 1 and "broken.kvfold" in str(problems[0])
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
    old, new = (tmp_path / f".a.kvfold.{digit * 32}.tmp" for digit in "01")
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


# --- prefixes ------------------------------------------------------------------------------------

BYTES = st.binary(max_size=4).map(lambda data: bytes(b % 2 for b in data))


@given(st.lists(st.tuples(BYTES, st.booleans()), max_size=12), BYTES)
@settings(max_examples=200, deadline=None)
def test_the_longest_is_found(keys, tail):
    prefixes, held = PrefixIndex(), []
    for i, (key, stays) in enumerate(keys):
        prefixes.add(PrefixKey.of(key), str(i))
        held.append((key, str(i)))
        if not stays:
            gone = held.pop(len(held) // 2)
            prefixes.remove(PrefixKey.of(gone[0]), gone[1])
    for data in (tail, tail + b"\0", b"\1" + tail):
        fits = [(len(k), int(n)) for k, n in held if data.startswith(k) and len(k) < len(data)]
        assert prefixes.longest(data) == (str(max(fits)[1]) if fits else None)


def test_a_prefix_is_of_whole_tokens(holder, made):
    contexts = holder(3)
    contexts.add(made[0], "c0", b"some text\n\n")
    ids = made[0].ids[0].tolist()
    assert contexts.longest(TOKENS, token_bytes(ids)) is None
    assert contexts.longest(TOKENS, token_bytes([*ids, 0])).id == "c0"
    assert contexts.longest(TOKENS, token_bytes([*ids[:-1], ids[-1] + 1, 0])) is None
    assert contexts.longest(TEXT, b"some text\n\nq").id == "c0"
    assert contexts.longest(TEXT, b"some text\nq") is None
    contexts.delete("c0")
    assert contexts.longest(TOKENS, token_bytes([*ids, 0])) is None


def test_a_reader_that_fails_leaves(holder, made):
    contexts = holder(3)
    contexts.add(made[0], "c0")
    with pytest.raises(RuntimeError), contexts.reading("c0"):
        raise RuntimeError
    assert contexts.get("c0").idle
    assert torch.equal(contexts.get("c0").context.ids, made[0].ids)
    until(lambda: contexts.get("c0").readers == 0)
