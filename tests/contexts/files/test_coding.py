# SPDX-License-Identifier: Apache-2.0
"""Files with a codec: what comes back, keys before RoPE as the projection gave them, refusals."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvfold
from kvfold import ContextFileError, KvfoldError, ScorerFileError
from kvfold.contexts.files import coding
from kvfold.contexts.files.coding import CodedHead, _turned, rotations_of
from kvfold.contexts.files.format import read_header
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.contexts import (
    DOCUMENT,
    KINDS,
    KIVI,
    QUESTION,
    assert_same,
    compressed,
    new_model,
)

CODABLE = ["full", "snapkv", "d2o", "streaming_llm", "kvzip", "adakv"]


@pytest.fixture(scope="module")
def basis(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    kvfold.fit_codec(model, tokenizer, texts(4), path)
    return path


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", [spec for spec in KINDS if "recall" not in spec])
def test_zstd_loses_nothing(model, tokenizer, tmp_path, spec):
    context = compressed(model, tokenizer, spec)
    context.save(tmp_path / "coded", codec="zstd")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    assert_same(loaded.cache, context.cache)
    assert loaded.ask(QUESTION) == context.ask(QUESTION)


def test_a_zstd_file_of_before_loads_and_one_of_now_is_smaller(
    model, tokenizer, tmp_path, monkeypatch
):
    """Before, one level-3 frame held the planes of a tensor without a border between them."""
    zstandard = pytest.importorskip("zstandard")
    context = compressed(model, tokenizer, "snapkv")
    context.save(tmp_path / "now", codec="zstd")

    def of_before(planes, by):
        return zstandard.ZstdCompressor(level=3).compress(b"".join(planes))

    monkeypatch.setattr("kvfold.codecs.compression.compressed", of_before)
    context.save(tmp_path / "before", codec="zstd")
    assert (tmp_path / "now").stat().st_size < (tmp_path / "before").stat().st_size
    for name in ("now", "before"):
        assert_same(kvfold.load(tmp_path / name, model, tokenizer).cache, context.cache)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", CODABLE)
def test_kvtc_gives_back_near_keys_and_values_of_the_same_tokens(
    model, tokenizer, tmp_path, basis, spec
):
    context = compressed(model, tokenizer, spec)
    context.save(tmp_path / "coded", codec=f"kvtc:file={basis},ratio=2,window=8")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    seen = context.ids.shape[1]
    for layer, (given, found) in enumerate(
        zip(context.cache.states, loaded.cache.states, strict=True)
    ):
        columns = context.cache.positions(layer)
        assert all(
            torch.equal(a, b)
            for a, b in zip(columns[0], loaded.cache.positions(layer)[0], strict=True)
        )
        at = given.columns()
        whole = (at < 4) | (at >= seen - 8)
        for a, b in zip(given.stored().dense(), found.stored().dense(), strict=True):
            assert torch.equal(a[whole], b[whole])
            error = float((a - b).norm() / a.norm())
            assert 0 < error < 0.25
    assert loaded.ask(QUESTION, max_new_tokens=5)


@pytest.mark.parametrize("spec", CODABLE)
def test_kivi4_gives_back_codes_of_groups(model, tokenizer, tmp_path, spec):
    """Each number is one of 16 between the ends of its group; what fills no group is exact."""
    context = compressed(model, tokenizer, spec)
    context.save(tmp_path / "coded", codec="kivi4")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    assert (tmp_path / "coded").stat().st_size < context.stats().nbytes
    for given, found in zip(context.cache.states, loaded.cache.states, strict=True):
        at = given.columns()
        assert torch.equal(at, found.columns())
        for side, (a, b) in enumerate(
            zip(given.stored().dense(), found.stored().dense(), strict=True)
        ):
            for was, now, columns in zip(a[0], b[0], at[0], strict=True):
                was, now = was[columns >= 0], now[columns >= 0]
                old = len(was) // 32 * 32
                assert torch.equal(was[old:], now[old:])
                size = was.shape[1]
                shape, dim = (((-1, 32, size), 1), ((old, -1, min(32, size)), 2))[side]
                grouped = was[:old].view(shape) if old else was.new_zeros(0, 1, 1)
                ends = grouped.amax(dim, True) - grouped.amin(dim, True) if old else grouped
                wrong = (grouped - now[:old].view_as(grouped)).abs() if old else grouped
                assert bool((wrong <= ends / 15 * 0.501 + 1e-6).all())
                assert not old or bool(wrong.any())
    assert loaded.ask(QUESTION, max_new_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["zstd", "kivi4", "kvtc:file={},ratio=2,window=8"])
@pytest.mark.parametrize("spec", ["snapkv:window=8 + match", "kvzip + match"])
def test_biases_are_exact_with_every_codec(model, tokenizer, tmp_path, basis, spec, codec):
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 40)
    context.save(tmp_path / "coded", codec=codec.format(basis))
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    for given, found in zip(context.cache.states, loaded.cache.states, strict=True):
        real = given.columns() >= 0
        assert torch.equal(given.columns(), found.columns())
        assert bool(given.stored().bias[real].any())
        assert torch.equal(found.stored().bias[real], given.stored().bias[real])
    assert loaded.stats().refits == context.stats().refits
    assert loaded.ask(QUESTION, max_new_tokens=5)


def test_a_low_ratio_is_near_exact(model, tokenizer, tmp_path, basis):
    context = compressed(model, tokenizer, "full")
    context.save(tmp_path / "coded", codec=f"kvtc:file={basis},ratio=1")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    for given, found in zip(context.cache.states, loaded.cache.states, strict=True):
        for a, b in zip(given.stored().dense(), found.stored().dense(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-2 * float(a.abs().max()), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keys_are_coded_as_they_were_before_rope(tokenizer, family):
    model = new_model(family)
    found = []
    name = "k_norm" if family == "qwen3" else "k_proj"
    for layer in model.model.layers:
        module = getattr(layer.self_attn, name)
        module.register_forward_hook(lambda module, given, out: found.append(out[0]))
    cache = kvfold.compress(model, tokenizer, DOCUMENT, "full").cache
    found = found[-len(cache.states) :]  # of the last forward
    for layer, state in enumerate(cache.states):
        keys = state.stored().keys[0]
        before = found[layer].reshape(keys.shape[1], *keys.shape[::2]).transpose(0, 1)
        at = torch.arange(keys.shape[1])
        heads = [CodedHead(layer, ("", ""), at, at) for _ in keys]
        none = [at < 0] * len(heads)
        for mine, theirs in zip(
            _turned(rotations_of(cache), heads, none, list(keys), back=True), before, strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_a_smaller_ratio_takes_fewer_bytes_and_says_so_in_the_file(
    model, tokenizer, tmp_path, basis
):
    context, sizes = compressed(model, tokenizer, "full"), []
    for ratio in (2, 4, 6):
        context.save(tmp_path / "a", codec=f"kvtc:file={basis},ratio={ratio}")
        header = read_header(tmp_path / "a")
        assert header.codec.codec == f"kvtc:file={basis},ratio={ratio}.0,sinks=4,window=16"
        sizes.append((tmp_path / "a").stat().st_size)
    assert sizes == sorted(sizes, reverse=True)
    context.save(tmp_path / "a")
    assert read_header(tmp_path / "a").codec is None


def test_what_was_read_since_stays_whole(model, tokenizer, tmp_path, basis):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip", 40)
    longer = context.append(" the grass is green the sky is blue")
    longer.save(tmp_path / "coded", codec=f"kvtc:file={basis},ratio=3")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    assert loaded.cache.stats().kept == longer.cache.stats().kept
    assert torch.equal(loaded.ids, longer.ids) and loaded.ask(QUESTION)


def test_a_missing_another_or_a_damaged_basis_is_refused(model, tokenizer, tmp_path, basis):
    own = tmp_path / "own.safetensors"
    shutil.copy(basis, own)
    path = tmp_path / "coded"
    compressed(model, tokenizer, "full").save(path, codec=f"kvtc:file={own}")
    kvfold.load(path, model, tokenizer)
    own.unlink()
    with pytest.raises(ContextFileError, match=r"own.safetensors .* is not there: put a copy"):
        kvfold.load(path, model, tokenizer)
    kvfold.fit_codec(model, tokenizer, texts(5), own)
    with pytest.raises(ContextFileError, match="is another basis"):
        kvfold.load(path, model, tokenizer)
    own.write_bytes(basis.read_bytes()[:-100])
    with pytest.raises(ContextFileError, match="cannot read"):
        kvfold.load(path, model, tokenizer)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(path, tmp_path / "elsewhere" / "coded")
    shutil.copy(basis, tmp_path / "elsewhere" / "own.safetensors")
    kvfold.load(moved, model, tokenizer)


DAMAGED = [("zstd", "kvzip", 170), ("kivi4", "kvzip", 170), ("kvtc", "kvzip", 250)]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("codec, spec, times", [*DAMAGED, ("kvtc", "full", 250)])
def test_every_damage_is_refused(model, tokenizer, tmp_path, basis, codec, spec, times):
    """Of kvtc both scopes: heads that keep different tokens, and the same."""
    text = f"kvtc:file={basis}" if codec == "kvtc" else codec
    path, rng = tmp_path / "coded", random.Random(0)
    compressed(model, tokenizer, spec).save(path, codec=text)
    entries = read_header(path).codec.entries
    assert entries is None or entries.scope == ("joint" if spec == "full" else "head")
    assert (entries is None) == (codec != "kvtc")
    whole = path.read_bytes()
    for number in range(times):
        place = rng.randrange(len(whole))
        flipped = bytes([whole[place] ^ 1 << rng.randrange(8)])
        cut, turned = whole[:place], whole[:place] + flipped + whole[place + 1 :]
        path.write_bytes(cut if number % 2 else turned)
        with pytest.raises(ContextFileError):
            kvfold.load(path, model, tokenizer)


@pytest.mark.parametrize("window", [16, 200])
def test_a_text_shorter_than_sinks_and_window_is_stored_whole(
    model, tokenizer, tmp_path, basis, window
):
    short = DOCUMENT if window == 200 else " ".join(DOCUMENT.split()[:12])
    context = kvfold.compress(model, tokenizer, short, "full")
    assert context.ids.shape[1] < 4 + window
    context.save(tmp_path / "coded", codec=f"kvtc:file={basis},window={window}")
    assert_same(kvfold.load(tmp_path / "coded", model, tokenizer).cache, context.cache)


@pytest.mark.parametrize("spec", [KIVI, "think", "minicache", "turboquant"])
def test_entries_that_are_encoded_already_are_refused(model, tokenizer, tmp_path, basis, spec):
    context = kvfold.compress(model, tokenizer, DOCUMENT, spec)
    for codec in ("kivi4", f"kvtc:file={basis}"):
        with pytest.raises(KvfoldError, match='encoded already: save it with codec="zstd"'):
            context.save(tmp_path / "coded", codec=codec)
    assert not (tmp_path / "coded").exists()


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["full", "snapkv", "kvzip", "snapkv + reindex", "finch", "streaming_llm"]
)
def test_keys_that_were_moved_come_back_where_they_are(model, tokenizer, tmp_path, basis, spec):
    moved = kvfold.compress(model, tokenizer, DOCUMENT, spec, None if spec == "full" else 40)
    if spec in ("full", "snapkv", "kvzip"):
        moved = moved.drop((8, 20))
    moved.save(tmp_path / "coded", codec=f"kvtc:file={basis},ratio=1")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    for given, found in zip(moved.cache.states, loaded.cache.states, strict=True):
        keys = given.stored().dense()[0]
        error = (keys - found.stored().dense()[0]).abs().max()
        assert error < 8e-2 * float(keys.abs().max())


def test_a_basis_of_another_model_is_refused(tokenizer, tmp_path, basis):
    other = new_model(hidden_size=48)
    context = kvfold.compress(other, tokenizer, DOCUMENT, "full")
    with pytest.raises(ScorerFileError, match="another model"):
        context.save(tmp_path / "coded", codec=f"kvtc:file={basis}")
    with pytest.raises(ScorerFileError, match="cannot read"):
        context.save(tmp_path / "coded", codec=f"kvtc:file={tmp_path / 'none'}")
    assert not (tmp_path / "coded").exists()


def test_a_gpu_without_memory_is_no_damaged_file(monkeypatch):
    def no_memory(file):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(coding, "_unpacked", no_memory)
    file = SimpleNamespace(header=SimpleNamespace(codec=SimpleNamespace(codec="kivi4")))
    with pytest.raises(torch.OutOfMemoryError):
        coding.decoded(file, None)


@pytest.mark.parametrize("words", range(26, 44, 3))
def test_short_documents_whose_streams_are_empty_are_saved(
    model, tokenizer, tmp_path, basis, words
):
    """At a high ratio every code of a few entries is zero, and nothing is left to write."""
    context = kvfold.compress(model, tokenizer, " ".join(["bell"] * words), "full")
    context.save(tmp_path / "coded", codec=f"kvtc:file={basis},ratio=32")
    loaded = kvfold.load(tmp_path / "coded", model, tokenizer)
    for layer in range(len(context.cache.states)):
        pairs = zip(
            context.cache.positions(layer)[0], loaded.cache.positions(layer)[0], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
