# SPDX-License-Identifier: Apache-2.0
"""Files of an attacker, with right checksums: refused in words, before memory is taken for them."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kvfold
from kvfold import ContextFileError
from kvfold.codecs.compression import compressed_tensor, compressor
from kvfold.contexts.files import bounds, coding
from kvfold.contexts.files.format import CHECKSUM, CODED, FORMAT, HEADER, VERSION, read_header
from kvfold.hf.header import digest, digest_of
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.contexts import (
    DOCUMENT,
    QUESTION,
    assert_same,
    compressed,
    contents,
    new_model,
)

MOST_GROWTH = 200 * 2**20  # bytes of the process, for files of some kilobytes
SAVED = (
    ("snapkv", None),
    ("adakv", "zstd"),
    ("kvzip", "kivi4"),
    ("full", "kvtc:file={},ratio=2,window=8"),
    ("kivi:bits=4,group=8,residual=32", None),
    ("turboquant:residual=8", None),
    ("h2o", "zstd"),
)
STRANGE = (2**33, 2**62, 10**30, -1, -(2**62), 2.5, 1e300, True, float("nan"), [], None, "7")


@pytest.fixture(scope="module")
def basis(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    kvfold.fit_codec(model, tokenizer, texts(4), path)
    return path


def signed(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> Path:
    """A file of these tensors and this header, with the checksums of both."""
    header = header | {"checksums": {name: digest_of(each) for name, each in tensors.items()}}
    text, version = json.dumps(header), CODED if header.get("codec") else VERSION
    save_file(tensors, path, {FORMAT: version, HEADER: text, CHECKSUM: digest(version + text)})
    return path


def numbers(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all numbers of a header, but those that are compared with the model's."""
    if path in (("model",), ("rope",)):
        return
    if isinstance(part, dict | list):
        for key, each in part.items() if isinstance(part, dict) else enumerate(part):
            yield from numbers(each, (*path, key))
    elif isinstance(part, int | float) or part is None:
        yield path


def with_value(part: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = part.copy()
    copied[path[0]] = with_value(part[path[0]], path[1:], value)
    return copied


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("spec", "codec"), SAVED)
def test_every_number_of_a_header_may_be_anything(model, tokenizer, tmp_path, basis, spec, codec):
    path, rng = tmp_path / "a", random.Random(0)
    compressed(model, tokenizer, spec).save(path, codec=codec and codec.format(basis))
    kvfold.load(path, model, tokenizer).ask(QUESTION, max_new_tokens=2)
    tensors, header = contents(path)
    tried = [(place, value) for place in numbers(header) for value in STRANGE]
    before, refused = peak(), 0
    for place, value in rng.sample(tried, min(150, len(tried))):
        altered = signed(tmp_path / "b", tensors, with_value(header, place, value))
        try:
            kvfold.load(altered, model, tokenizer).ask(QUESTION, max_new_tokens=2)
        except kvfold.KvfoldError:
            refused += 1
    assert refused > 50
    assert peak() - before < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_numbers_of_other_layers_may_be_anything(tokenizer, tmp_path, family):
    model, path = new_model(family), tmp_path / "a"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path)
    tensors, header = contents(path)
    first, *rest = header["others"]
    before = peak()
    for name in first["numbers"]:
        for value in STRANGE:
            other = [with_value(first, ("numbers", name), value), *rest]
            altered = signed(tmp_path / "b", tensors, header | {"others": other})
            try:
                kvfold.load(altered, model, tokenizer).ask(QUESTION, max_new_tokens=2)
            except kvfold.KvfoldError:
                continue
            assert value == first["numbers"][name]
    assert peak() - before < MOST_GROWTH


def of_zstd(model: Any, tokenizer: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    compressed(model, tokenizer, "snapkv").save(path, codec="zstd")
    return contents(path)


def test_what_a_small_file_would_become_is_refused_before_it_is_unpacked(
    model, tokenizer, tmp_path, monkeypatch
):
    tensors, header = of_zstd(model, tokenizer, tmp_path / "a")
    monkeypatch.setattr(
        "kvfold.contexts.files.format.decompressed_tensor", lambda *given: pytest.fail("unpacked")
    )
    name = next(iter(header["codec"]["streams"]))
    for shape in ([2**36], [0, 2**36], [2**20, 2**20, 2**20], [2**40] * 8):
        streams = with_value(header, ("codec", "streams", name, "shape"), shape)
        with pytest.raises(ContextFileError, match=r"its [\d,]+ bytes would become [\d,]{12,}"):
            read_header(signed(tmp_path / "b", tensors, streams))
    for shape in ([2**41], [1] * 9, [-1]):
        streams = with_value(header, ("codec", "streams", name, "shape"), shape)
        with pytest.raises(ContextFileError, match="does not have this version's fields"):
            read_header(signed(tmp_path / "b", tensors, streams))


def test_one_tensor_under_many_names_counts_as_many(model, tokenizer, tmp_path):
    tensors, header = of_zstd(model, tokenizer, tmp_path / "a")
    large = max(header["codec"]["streams"].items(), key=lambda each: sum(each[1]["shape"]))[0]
    tensors[large] = compressed_tensor(torch.zeros(2**23, dtype=torch.uint8), compressor())
    streams = with_value(header, ("codec", "streams", large), {"dtype": "uint8", "shape": [2**23]})
    read_header(signed(tmp_path / "b", tensors, streams))  # once it may
    named = streams | {"same_as": {f"layers.0.x{i}": large for i in range(50)}}
    with pytest.raises(ContextFileError, match="would become"):
        read_header(signed(tmp_path / "b", tensors, named))


def with_tokens(header: dict[str, Any], seen: int) -> dict[str, Any]:
    layers = [layer | {"seen": seen} for layer in header["layers"]]
    return header | {"seen": seen, "layers": layers}


def test_tokens_are_bounded_by_the_file_and_by_its_tokens(model, tokenizer, tmp_path):
    tensors, header = of_zstd(model, tokenizer, tmp_path / "a")
    for seen in (header["seen"] + 1, 2**30):
        with pytest.raises(ContextFileError, match=r"does not hold the .* tokens that it names"):
            read_header(signed(tmp_path / "b", tensors, with_tokens(header, seen)))
    count = 2**23
    tensors["ids"] = compressed_tensor(torch.zeros(count, dtype=torch.int32), compressor())
    held = with_tokens(header, count)
    held["codec"]["streams"]["ids"] = {"dtype": "int32", "shape": [count]}
    with pytest.raises(ContextFileError, match="does not hold the 8,388,608 tokens"):
        read_header(signed(tmp_path / "b", tensors, held))


def test_tokens_are_those_of_the_model(model, tokenizer, tmp_path):
    compressed(model, tokenizer, "snapkv").save(tmp_path / "a")
    tensors, header = contents(tmp_path / "a")
    ids = tensors["ids"]
    for others, told in (
        (ids.clone().fill_(12), "token 12 has no embedding"),
        (ids.clone().fill_(-1), "token -1 has no embedding"),
        (ids.double(), "of torch.float64"),
        (ids.bool(), "of torch.bool"),
    ):
        altered = signed(tmp_path / "b", tensors | {"ids": others}, header)
        with pytest.raises(ContextFileError, match=f"is damaged, .*{told}"):
            kvfold.load(altered, model, tokenizer)


def test_a_file_of_before_whose_tokens_are_compressed_loads(model, tokenizer, tmp_path):
    tensors, header = of_zstd(model, tokenizer, tmp_path / "a")
    assert "ids" not in header["codec"]["streams"]
    shape = list(tensors["ids"].shape)
    tensors["ids"] = compressed_tensor(tensors["ids"], compressor())
    header["codec"]["streams"]["ids"] = {"dtype": "int32", "shape": shape}
    loaded = kvfold.load(signed(tmp_path / "b", tensors, header), model, tokenizer)
    assert_same(loaded.cache, kvfold.load(tmp_path / "a", model, tokenizer).cache)
    assert loaded.ids.shape[1] == shape[0]


@pytest.mark.parametrize(("spec", "codec"), [("full", "kvtc:file={},ratio=2"), ("full", "kivi4")])
def test_entries_that_a_codec_takes_no_bytes_for_are_bounded(
    model, tokenizer, tmp_path, basis, spec, codec
):
    compressed(model, tokenizer, spec).save(tmp_path / "a", codec=codec.format(basis))
    tensors, header = contents(tmp_path / "a")
    count = 2**20
    tensors["ids"] = compressed_tensor(torch.zeros(count, dtype=torch.int32), compressor())
    header["codec"]["streams"]["ids"] = {"dtype": "int32", "shape": [count]}
    altered = signed(tmp_path / "b", tensors, with_tokens(header, count))
    before = peak()
    with pytest.raises(ContextFileError, match=r"would become|do not fit the context's entries"):
        kvfold.load(altered, model, tokenizer)
    assert peak() - before < MOST_GROWTH


def test_what_shrinks_to_nothing_is_written_as_it_is(model, tokenizer, tmp_path, monkeypatch):
    """So no file of kvfold's own is refused."""
    context = compressed(model, tokenizer, "adakv")
    monkeypatch.setattr(coding, "TIMES", 1)
    context.save(tmp_path / "a", codec="zstd")
    streams = read_header(tmp_path / "a").codec.streams
    assert_same(kvfold.load(tmp_path / "a", model, tokenizer).cache, context.cache)
    monkeypatch.undo()
    context.save(tmp_path / "a", codec="zstd")
    assert len(streams) < len(read_header(tmp_path / "a").codec.streams)


def test_scales_of_another_shape_are_not_spread_over_all_codes(model, tokenizer, tmp_path):
    compressed(model, tokenizer, "full").save(tmp_path / "a", codec="kivi4")
    tensors, header = contents(tmp_path / "a")
    for side in ("keys", "values"):
        name = f"codec.{side}.scale"
        shape = header["codec"]["streams"][name]["shape"]
        spread = torch.zeros(1000, *shape[1:])
        altered = tensors | {name: compressed_tensor(spread, compressor())}
        other = with_value(header, ("codec", "streams", name, "shape"), list(spread.shape))
        with pytest.raises(ContextFileError, match="do not fit the context's entries"):
            kvfold.load(signed(tmp_path / "b", altered, other), model, tokenizer)


def test_a_basis_that_is_a_pipe_or_another_file_is_refused_unread(
    model, tokenizer, tmp_path, basis, monkeypatch
):
    compressed(model, tokenizer, "full").save(tmp_path / "a", codec=f"kvtc:file={basis}")
    tensors, header = contents(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    save_file({"weights": torch.zeros(3)}, tmp_path / "weights.safetensors")
    monkeypatch.setattr("kvfold.fitted.file.digest_of", lambda tensor: pytest.fail("read"))
    for name in ("pipe", "weights.safetensors"):
        codec = header["codec"] | {"codec": f"kvtc:file={tmp_path / name},ratio=2"}
        altered = signed(tmp_path / "b", tensors, header | {"codec": codec})
        with pytest.raises(ContextFileError, match=r"it is a pipe|no fitted scorer of kvfold"):
            kvfold.load(altered, model, tokenizer)


def test_layers_that_come_twice_are_refused(model, tokenizer, tmp_path):
    compressed(model, tokenizer, "snapkv").save(tmp_path / "a")
    tensors, header = contents(tmp_path / "a")
    for layers in ([*header["layers"], header["layers"][0]], header["layers"][1:]):
        with pytest.raises(ContextFileError, match="not numbered one by one"):
            read_header(signed(tmp_path / "b", tensors, header | {"layers": layers}))


def test_a_file_may_become_what_its_bytes_allow():
    assert bounds.unpacked_bytes(0) == 2**26
    assert bounds.unpacked_bytes(1000) == 2**26 + 1024 * 1000
    assert bounds.nbytes([3, 0, 5], "float32") == 60
    assert bounds.nbytes([]) == 8
