# SPDX-License-Identifier: Apache-2.0
"""The format of context files: headers, versions, checksums, and damage that is noticed."""

from __future__ import annotations

import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvfold
from kvfold import ContextFileError
from kvfold.contexts.files import stock_layers as others
from kvfold.contexts.files.format import FORMAT, read_header
from kvfold.contexts.files.header import StockLayerHeader
from kvfold.methods.base import preset, spelled_out
from tests.helpers.contexts import QUESTION, TURBO, assert_same, compressed, new_model, rewritten
from tests.helpers.models import with_key_biases
from tests.helpers.tokenizers import WORDS


def test_every_method_is_spelled_out_so_that_it_can_be_read():
    for name in kvfold.list_methods():
        method = preset(name)
        assert kvfold.parse(spelled_out(method)) == method
    text = "snapkv:window=16 + kivi:bits=2"
    assert kvfold.parse(spelled_out(kvfold.parse(text))) == kvfold.parse(text)
    assert "kernel=" in spelled_out(kvfold.parse(text))


def test_another_version_is_refused(model, tokenizer, saved, tmp_path):
    path = rewritten(tmp_path / "a.kvfold", saved, version="5")
    reads = "format version '5', and this kvfold reads 1, 2, 3, 4"
    with pytest.raises(ContextFileError, match=reads):
        kvfold.load(path, model, tokenizer)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", [TURBO, f"adakv + {TURBO}"])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_files_hold_the_means_of_keys(tokenizer, tmp_path, spec, codec):
    """In a format version of their own, as older readers would leave them out."""
    model = with_key_biases(new_model(head_dim=16), [1, 6, 7, 15], 60.0)
    context = compressed(model, tokenizer, spec)
    assert any(state.store._keys.encoded.means is not None for state in context.cache.states)
    path = tmp_path / "a.kvfold"
    context.save(path, **({} if codec is None else {"codec": codec}))
    with safe_open(path, "pt") as file:
        assert file.metadata()[FORMAT] == "4"
    loaded = kvfold.load(path, model, tokenizer)
    assert_same(loaded.cache, context.cache)
    assert loaded.ask(QUESTION) == context.ask(QUESTION)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"method": "newest:of=all"}, "a method that this kvfold does not have: unknown method"),
        ({"method": "snapkv:window=16"}, "and this kvfold has snapkv:window=16,"),
        ({"written_by": 5}, "its header does not have this version"),
        ({"more": 5}, "its header does not have this version"),
        ({"layers": []}, "holds 0 layers, and the model's cache has 4"),
        ({"same_as": {"ids": "prefix"}}, "the tensor prefix is missing"),
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused(model, tokenizer, saved, tmp_path, changes, named):
    path = rewritten(tmp_path / "a.kvfold", saved, **changes)
    with pytest.raises(ContextFileError) as refusal:
        kvfold.load(path, model, tokenizer)
    assert named in str(refusal.value)


@pytest.mark.slow
def test_keys_that_were_moved_are_refused(model, tokenizer, saved, tmp_path):
    rope = read_header(saved).rope.model_dump() | {"moved": -110}
    path = rewritten(tmp_path / "a.kvfold", saved, rope=rope)
    with pytest.raises(ContextFileError, match="another RoPE: keys moved by -110 positions"):
        kvfold.load(path, model, tokenizer)


def test_what_is_no_context_is_refused(model, tokenizer, saved, tmp_path):
    path = tmp_path / "a.kvfold"
    with pytest.raises(ContextFileError, match=r"cannot read .*a\.kvfold"):
        kvfold.load(path, model, tokenizer)
    path.write_bytes(b"")
    with pytest.raises(ContextFileError, match=r"cannot read .*a\.kvfold"):
        kvfold.load(path, model, tokenizer)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ContextFileError, match="no context of kvfold"):
        kvfold.load(path, model, tokenizer)
    with pytest.raises(ContextFileError, match="cannot read"):
        kvfold.load(tmp_path, model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1, 2])
def test_too_many_open_files_are_named(saved, left):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # numbers below are taken
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        with pytest.raises(ContextFileError, match="too many files are open"):
            read_header(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_truncated_and_altered_files_are_refused(model, tokenizer, saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "a.kvfold"
    generator = random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [generator.randrange(len(data)) for _ in range(200)]
    places += [generator.randrange(header) for _ in range(50)]
    for at in places:
        cut, flipped = data[:at], bytearray(data)
        flipped[at] ^= 1 << generator.randrange(8)
        for altered in (cut, bytes(flipped), data + data[:at]):
            if altered == data:
                continue
            path.write_bytes(altered)
            with pytest.raises(ContextFileError):
                kvfold.load(path, model, tokenizer)


def test_swapped_tensors_and_other_numbers_are_refused(model, tokenizer, saved, tmp_path):
    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = file.metadata()
    one, other = "layers.0.keys.words.0", "layers.0.keys.words.1"
    path = tmp_path / "a.kvfold"
    for changes in (
        {one: tensors[other], other: tensors[one]},
        {one: tensors[one].view(torch.float32)},
        {one: tensors[one].flatten()},
        {"more": tensors[one].clone()},
    ):
        save_file(tensors | changes, path, found)
        with pytest.raises(ContextFileError, match="is damaged"):
            kvfold.load(path, model, tokenizer)


def test_the_header_says_what_is_inside(model, tokenizer, saved):
    header = read_header(saved)
    stats = kvfold.load(saved, model, tokenizer).stats()
    assert header.seen == stats.seen
    assert [layer.kept for layer in header.layers] == [rows[0] for rows in stats.kept]
    assert header.bits == (4, 4) and header.dtype == "float32"
    assert header.model.config["num_key_value_heads"] == 2
    assert header.rope.parameters["rope_type"] == "default"
    with safe_open(saved, "pt") as file:
        ids, places = file.get_tensor("ids"), file.get_tensor("layers.0.columns.0")
        frequencies = file.get_tensor("rope.rotary_emb.inv_freq")
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    words = tokenizer.decode(ids[places.long()].tolist())
    assert set(words.split()) <= {*WORDS, "<bos>"}


@pytest.mark.parametrize(
    "numbers",
    [{"update": None}, {"__class__": None}, {"dtype": "dtype nosuch"}, {"a/b": 1}, {"keys/0": 1}],
    ids=str,
)
def test_a_file_sets_nothing_but_what_a_layer_holds(numbers):
    layer = DynamicSlidingWindowLayer(sliding_window=8)
    part = StockLayerHeader(
        index=0, kind=type(layer).__name__, numbers=numbers, by_head=[], whole=[]
    )
    with pytest.raises(ContextFileError, match="layer 0"):
        others.restore(layer, part, {}, {}, torch.device("cpu"), seen=100)
    assert callable(layer.update)
