# SPDX-License-Identifier: Apache-2.0
"""What holds contexts: the cap, what goes to disk and comes back, and who waits for whom."""

from __future__ import annotations

import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import kvfold
from kvfold.cache import shrink as shrinking
from kvfold.cache.layer import CompressedLayer
from kvfold.contexts.files.format import read_header
from kvfold.serve import context_pool
from kvfold.serve.errors import ApiError
from kvfold.serve.stored import PrefixKey, size_of
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.chats import storages
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.held_contexts import counted, in_memory
from tests.helpers.scorers import zap_of
from tests.helpers.serving import until


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("spec", ["snapkv", "adakv", "streaming_llm"])
def test_the_size_is_that_of_every_tensor(tokenizer, family, spec):
    context = kvfold.compress(new_model(family), tokenizer, DOCUMENT, spec, 40)
    own = [
        layer if isinstance(layer, CompressedLayer) else vars(layer)
        for layer in context.cache.layers
    ]
    reachable = sum(storages([own, context.ids, context.cache.phase.history], {}, set()).values())
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


@pytest.fixture(scope="module")
def basis(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    kvfold.fit_codec(model, tokenizer, texts(4), path)
    return path


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("codec", ["kivi4", "kvtc:file={basis},ratio=4", "zstd"])
def test_what_comes_back_from_a_coded_file_answers_as_the_file_does(
    model, tokenizer, holder, made, basis, codec
):
    contexts = holder(1.5)
    contexts.codec = codec.format(basis=basis)
    contexts.add(made[0], "c0")
    contexts.add(made[1], "c1")  # there is room for one
    assert in_memory(contexts) == ["c1"]
    file = contexts.folder.path / "c0.kvfold"
    assert codec.startswith(read_header(file).codec.codec.partition(":")[0])
    expected = kvfold.load(file, model, tokenizer)
    with contexts.reading("c0") as context:
        assert context is not made[0]
        for given, found in zip(expected.cache.states, context.cache.states, strict=True):
            for a, b in zip(given.stored().dense(), found.stored().dense(), strict=True):
                assert torch.equal(a, b)
        assert context.ask(QUESTION, max_new_tokens=6) == expected.ask(QUESTION, max_new_tokens=6)


@pytest.mark.parametrize(("spec", "room"), [("knorm", 2.5), ("zap", 2.9)])
def test_contexts_shrink_before_any_goes_to_disk(
    model, tokenizer, holder, made, spec, room, tmp_path
):
    spec = zap_of(model, tmp_path) if spec == "zap" else spec
    contexts, texts = holder(room), (DOCUMENT, DOCUMENT[:-9], DOCUMENT[:-21])
    contexts.shrink = 20
    for i, text in enumerate(texts):
        context = kvfold.compress(model, tokenizer, text, spec, 40, keep_scores=True)
        contexts.add(context, f"c{i}")
    assert in_memory(contexts) == ["c0", "c1", "c2"] and contexts.to_disk == 0
    assert contexts.nbytes == counted(contexts) <= contexts.memory
    assert [held.stats.budget for held in contexts.all()] == ["20 tokens", "20 tokens", "40 tokens"]
    for i, budget in enumerate((20, 20, 40)):
        alone = kvfold.compress(model, tokenizer, texts[i], spec, budget)
        with contexts.reading(f"c{i}") as context:
            assert context.ask(QUESTION, max_new_tokens=6) == alone.ask(QUESTION, max_new_tokens=6)
    # Without scores, and where nothing is left to shrink, contexts go to disk.
    contexts.add(made[0], "d0")
    contexts.add(made[1], "d1")
    contexts.add(made[2], "d2")
    assert contexts.to_disk > 0 and contexts.nbytes == counted(contexts) <= contexts.memory
    assert contexts.get("d0").stats.budget == "40 tokens"


def test_a_context_shrinks_without_a_second_cache(model, tokenizer, holder, made, tmp_path):
    """Its own layers let go of the larger stores."""
    contexts = holder(10)
    contexts.shrink = 20
    context = kvfold.compress(model, tokenizer, DOCUMENT, zap_of(model, tmp_path), 40)
    stored = contexts.add(context)
    held = [weakref.ref(state.stored()) for state in context.cache.states]
    with contexts._changed:
        contexts._shrink(stored, 20)
    assert not any(store() for store in held) and stored.value is context
    assert contexts.nbytes == counted(contexts) == stored.size


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_context_that_is_half_shrunk_is_counted_or_comes_back(
    model, tokenizer, holder, on_disk, monkeypatch
):
    contexts = holder(10)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "knorm", 40, keep_scores=True)
    alone = context.ask(QUESTION, max_new_tokens=6)
    stored = contexts.add(context)
    if on_disk:
        with contexts._changed:
            contexts._write(stored)
    evict, evicted = shrinking.bring_to_budget, []

    def short_of_memory(*args: Any) -> None:
        if len(evicted) == 2:
            raise torch.OutOfMemoryError("no room for the next layer")
        evicted.append(args)
        evict(*args)

    monkeypatch.setattr(shrinking, "bring_to_budget", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError), contexts._changed:
        contexts._shrink(stored, 20)
    assert contexts.nbytes == counted(contexts) and stored.idle
    if on_disk:
        with contexts.reading(stored.id) as read:
            assert read.ask(QUESTION, max_new_tokens=6) == alone


def test_a_context_is_written_once(holder, made, monkeypatch):
    contexts, saves = holder(1.5), []
    whole = context_pool.save
    monkeypatch.setattr(
        context_pool,
        "save",
        lambda context, path, **_: (saves.append(path.name), whole(context, path)),
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


def test_files_have_the_codec_of_the_pool(holder, made):
    contexts = holder(1.5)
    contexts.codec = "zstd"
    for i in range(2):
        contexts.add(made[i], f"c{i}")
    header = read_header(contexts.get("c0").file)
    assert header.codec is not None and header.codec.codec == "zstd"
    with contexts.reading("c0") as context:
        assert torch.equal(context.ids, made[0].ids)


@pytest.mark.parametrize("spec", ["turboquant:residual=8", "think"])
@pytest.mark.parametrize("codec", ["kivi4", "kvtc:file={basis}"])
def test_what_a_codec_refuses_is_saved_with_zstd(
    model, tokenizer, holder, basis, tmp_path, caplog, spec, codec
):
    contexts = holder(3, folder=tmp_path / "named")
    contexts.codec = codec.format(basis=basis)
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec)
    contexts.memory = int(1.5 * size_of(context))
    alone = context.ask(QUESTION, max_new_tokens=6)
    contexts.add(context, "c0")
    contexts.add(kvfold.compress(model, tokenizer, DOCUMENT, spec), "c1")  # c0 goes to disk
    assert in_memory(contexts) == ["c1"]
    with contexts.reading("c0") as loaded:
        assert loaded is not context and loaded.ask(QUESTION, max_new_tokens=6) == alone
    contexts.delete("c1")
    contexts.add(kvfold.compress(model, tokenizer, DOCUMENT, spec), "c2")
    contexts.close()
    for name in ("c0", "c2"):
        assert read_header(tmp_path / "named" / f"{name}.kvfold").codec.codec == "zstd"
        assert f"context {name} is saved with codec zstd: " in caplog.text


RECALL = "recall:residual=8"


def test_cold_entries_stay_in_the_file(model, tokenizer, holder, tmp_path, caplog):
    """They take no memory, however little there is; and no codec takes them."""
    contexts = holder(3, folder=tmp_path / "named")
    contexts.codec = "kivi4"
    context = kvfold.compress(model, tokenizer, DOCUMENT, RECALL)
    before, cold = size_of(context), context.stats().cold.host
    alone = context.ask(QUESTION, max_new_tokens=6)
    contexts.memory = before - cold
    held = contexts.add(context, "c0", {"text": PrefixKey.of(b"abc")})
    assert held.size == contexts.nbytes == before - cold > 0 and held.stats.cold[:2] == (0, cold)
    assert "context c0 is saved without a codec: " in caplog.text
    file = tmp_path / "named" / "c0.kvfold"
    assert read_header(file).text is not None
    with contexts.reading("c0") as loaded:
        assert loaded.ask(QUESTION, max_new_tokens=6) == alone
    contexts.delete("c0")
    assert not file.exists() and contexts.nbytes == 0


def test_cold_entries_that_no_file_takes_stay_in_memory(
    model, tokenizer, holder, caplog, monkeypatch
):
    def full(*_: Any, **__: Any) -> None:
        raise kvfold.KvfoldError("the disk is full")

    contexts = holder(100)
    monkeypatch.setattr(context_pool, "save", full)
    held = contexts.add(kvfold.compress(model, tokenizer, DOCUMENT, RECALL), "c0")
    assert held.stats.cold.host and held.unwritten and held.file is None
    assert "cold entries of context c0 stay in memory: the disk is full" in caplog.text


def test_a_name_is_taken_while_its_file_is_written(model, tokenizer, holder, made, monkeypatch):
    contexts, whole = holder(100, most=1), context_pool.save
    context = kvfold.compress(model, tokenizer, DOCUMENT, RECALL)

    def meanwhile(*args: Any, **options: Any) -> None:
        with pytest.raises(ApiError, match="already"):
            contexts.add(made[0], "c0")
        contexts.add(made[1], "c1")
        whole(*args, **options)

    monkeypatch.setattr(context_pool, "save", meanwhile)
    with pytest.raises(ApiError, match="holds its 1 contexts"):
        contexts.add(context, "c0")
    assert not list(contexts.folder.path.iterdir())  # no file of what is not held
    contexts.delete("c1")
    contexts.add(made[0], "c0")


def test_a_context_deleted_while_it_is_written_leaves_nothing(holder, made, monkeypatch):
    contexts, writing, go = holder(1.5), Event(), Event()
    whole = context_pool.save

    def slowly(context: Any, path: Path, **_: Any) -> None:
        writing.set()
        assert go.wait(10)
        whole(context, path)

    monkeypatch.setattr(context_pool, "save", slowly)
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


def test_a_reader_that_fails_leaves(holder, made):
    contexts = holder(3)
    contexts.add(made[0], "c0")
    with pytest.raises(RuntimeError), contexts.reading("c0"):
        raise RuntimeError
    assert contexts.get("c0").idle
    assert torch.equal(contexts.get("c0").value.ids, made[0].ids)
    until(lambda: contexts.get("c0").readers == 0)
