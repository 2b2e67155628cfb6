# SPDX-License-Identifier: Apache-2.0
"""Caches whose heads keep different numbers of entries, against masked-dense ones."""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvfold
from kvfold import KvfoldError
from kvfold.generation.reading import read_turn
from kvfold.kernels.views import BLOCK
from tests.helpers.budgets import compressed
from tests.helpers.caches import bits, counted_bytes, positions, reachable_bytes, same
from tests.helpers.exactness import FLOAT32_ONLY, kernel_spread, pieces
from tests.helpers.models import FAMILIES, build, continuation
from tests.helpers.models import prompts as random_prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


BUDGET = 64  # one block: some heads keep more, some less
DIFFERENT = 6  # entries that two heads of a layer are apart, at least
ALONE, PADDED = (192,), (192, 161, 50)
SLIDING = ("gpt_oss", "gemma2", "gemma3", "gemma3n")  # have sliding windows beside full layers
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
KVZIP, PYRAMID = "kvzip:chunk=100", "pyramidkv:window=8 + adakv"
METHODS = ["adakv:window=8", PYRAMID, "auto:window=8,tolerance=0.6", KVZIP]
RAGGED = pytest.mark.parametrize("spec", METHODS)
# The others run through all of test_phases: these two it cannot make by their names alone.
NEW = pytest.mark.parametrize("spec", [PYRAMID, KVZIP])
ON_TOP = [KVZIP]  # later turns are not evicted from
BOS = 1


def prompts(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """As tests.helpers.models makes them; all rows but the second begin as a chat does."""
    ids, mask = random_prompts(lengths)
    for row, length in enumerate(lengths):
        if row != 1:
            ids[row, lengths[0] - length] = BOS
    return ids, mask


def start(
    model: Any, spec: str, lengths: tuple[int, ...] = ALONE, chunk: int = 192, rows: Any = None
) -> Reader:
    """A reader that goes on after a prompt; of its `rows`, if they are named."""
    ids, mask = prompts(lengths)
    if rows is not None:
        ids, mask = ids[rows], mask[rows]
    reader = Reader(model, compressed(model, spec, BUDGET, tokenizer=word_tokenizer()), None)
    with torch.no_grad():
        read_turn(model, reader.cache, ids, mask, 192, chunk)
    reader.mask, reader.started = (None if bool(mask.all()) else mask), True
    return reader


def truth_of(model: Any, reader: Reader, lengths: tuple[int, ...]) -> MaskedDense:
    """Everything that `reader` has read, without what it evicted."""
    ids, mask = prompts(lengths)
    truth = MaskedDense(model, mask if len(lengths) > 1 else None)
    truth(ids)
    truth.hide(reader.cache)
    return truth


def spread(cache: kvfold.CompressedCache) -> int:
    """The largest difference between two heads of one row and layer, in entries."""
    return max(max(row) - min(row) for layer in cache.stats().kept for row in layer)


def decode(reader: Reader, steps: int = 6, seed: int = 2) -> list[Tensor]:
    rows = len(reader.cache.positions(0))
    return [reader(token) for token in continuation(rows, steps, seed).split(1, 1)]


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@cache
def dense_readers(name: str, lengths: tuple[int, ...]) -> tuple[Reader, MaskedDense, float]:
    """Stock attention and the truth after the prompt, and how far they are apart there."""
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    ids, mask = prompts(lengths)
    given = mask if len(lengths) > 1 else None
    model = FAMILIES[name](dtype)
    plain, truth = (
        Reader(model, stock_cache(model), given),
        MaskedDense(FAMILIES[name](dtype), given),
    )
    return plain, truth, worst(plain(ids), truth(ids), given)


@pytest.mark.slow
@pytest.mark.cases(2)
@RAGGED
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, PADDED) for name in ("llama", "qwen3", "gpt_oss", "gemma2", "gemma3", "gemma3n")),
        *((name, ALONE) for name in ("llama", "gemma2", "gemma3n")),
    ],
)
def test_ragged_caches_are_masked_dense(name, spec, lengths):
    if lengths == PADDED and spec.startswith("kvzip") and name in SLIDING:
        # Repetitions of other lengths would leave padding inside the windows of other rows.
        with pytest.raises(KvfoldError, match="a cache of its own"):
            start(build(name), spec, lengths)
        return
    *read, noise = dense_readers(name, lengths)
    plain, truth = map(copy.copy, read)
    plain.cache, truth.cache = copy.deepcopy(plain.cache), copy.deepcopy(truth.cache)
    truth.stored = {}
    model = plain.model
    reader = start(model, spec, lengths)
    assert spread(reader.cache) >= DIFFERENT
    assert max(n for layer in reader.cache.stats().kept for row in layer for n in row) > BLOCK
    truth.hide(reader.cache)
    off, effect = [], []
    for piece in pieces(len(lengths), 3):
        got, expected, everything = reader(piece), truth(piece), plain(piece)
        off.append(worst(got, expected))
        # A row of 50 may keep all it has; the longest never does.
        effect.append(worst(everything[:1], expected[:1]))
    assert max(off) <= (max(2e-5, 3 * noise) if name in FLOAT32_ONLY else 1e-6)
    assert min(effect) > 0.05


@pytest.mark.slow
@RAGGED
def test_ragged_caches_are_masked_dense_in_float32(spec):
    ids, _ = prompts(ALONE)
    model = build("llama")
    reader = start(model, spec)
    truth = truth_of(build("llama"), reader, ALONE)
    off = max(worst(reader(piece), truth(piece)) for piece in pieces(1, 8))
    assert off <= max(2e-5, 3 * kernel_spread("llama", ids, None))


@BATCHES
@RAGGED
def test_later_turns_are_masked_dense(model, spec, lengths):
    """Three more turns, with generated tokens between them; each ends in a compression."""
    reader = start(model, spec, lengths)
    truth = truth_of(build("llama", torch.float64), reader, lengths)
    assert spread(reader.cache) >= DIFFERENT
    rows = len(lengths)
    for turn in range(3):
        before, seen = positions(reader.cache), reader.cache.get_seq_length()
        for piece in pieces(rows, 2, block=40):
            assert worst(reader(piece), truth(piece)) <= 1e-6
        truth.hide(reader.cache)
        after = positions(reader.cache)
        stayed = [
            set(new[row][head]) & set(range(seen)) == set(old[row][head])
            for old, new in zip(before, after, strict=True)
            for row in range(rows)
            for head in range(2)
        ]
        assert all(stayed) if spec in ON_TOP else not all(stayed), turn


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 30])
@BATCHES
def test_kvzip_generates_what_the_truth_does(model, lengths, chunk):
    """The prompt's last token is read after the compression, as the first of the answer."""
    ids, mask = prompts(lengths)
    rows = len(lengths)
    text = torch.cat([ids, continuation(rows, 1, seed=8)], 1)
    whole = nn.functional.pad(mask, (0, 1), value=1)
    cache = compressed(model, KVZIP, BUDGET, tokenizer=word_tokenizer())
    out = kvfold.generate(
        model,
        text,
        cache=cache,
        attention_mask=whole,
        prefill_chunk=chunk,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    reader = start(model, KVZIP, lengths)
    assert cache.stats().protected == reader.cache.stats().protected
    truth = truth_of(build("llama", torch.float64), reader, lengths)
    fed = out.sequences[:, 192:-1].split(1, 1)
    for logits, token in zip(out.logits, fed, strict=True):
        # A generated 0 is a token, not padding.
        if truth.mask is not None:
            truth.mask = torch.cat([truth.mask, torch.ones_like(token)], 1)
            truth.started = False
        assert worst(logits, truth(token)[:, -1]) <= 1e-6


@pytest.mark.parametrize("spec", ["adakv:window=8", PYRAMID, "auto:window=8,tolerance=0.6", KVZIP])
def test_latents_have_no_heads_to_differ(spec):
    with pytest.raises(kvfold.UnsupportedModel, match="latents"):
        start(build("deepseek_v3"), spec)


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [50, 191])
@BATCHES
@NEW
def test_chunks_equal_one_shot(model, spec, lengths, chunk):
    whole, pieces_of_it = start(model, spec, lengths), start(model, spec, lengths, chunk)
    assert positions(pieces_of_it.cache) == positions(whole.cache)
    for got, expected in zip(decode(pieces_of_it), decode(whole), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@NEW
def test_a_padded_row_is_its_prompt_alone(model, spec):
    batch = start(model, spec, PADDED)
    together = decode(batch, 4)
    for row, length in enumerate(PADDED):
        padding = 192 - length
        ids, _ = prompts(PADDED)
        cache = compressed(model, spec, BUDGET, tokenizer=word_tokenizer())
        with torch.no_grad():
            read_turn(model, cache, ids[row : row + 1, padding:], None, length, length)
        alone = Reader(model, cache)
        for token, expected in zip(continuation(3, 4).split(1, 1), together, strict=True):
            got = alone(token[row : row + 1])
            torch.testing.assert_close(got[0], expected[row], atol=1e-6, rtol=0)
        for layer, expected in zip(positions(batch.cache), positions(cache), strict=True):
            assert [[at - padding for at in head] for head in layer[row]] == expected[0]


@pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([1, 2]), [1, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
@NEW
def test_rows_take_all_that_is_theirs_along(model, spec, change, argument, rows):
    reader, straight = start(model, spec, PADDED), start(model, spec, PADDED, rows=rows)
    steps = continuation(3, 8).split(1, 1)
    for token in steps[:4]:
        reader(token)
        straight(token[rows])
    getattr(reader.cache, change)(argument)
    reader.mask = reader.mask[rows]
    assert reader.cache.stats().kept == straight.cache.stats().kept
    assert reader.cache.stats().protected == straight.cache.stats().protected
    for piece in (*steps[4:], continuation(3, 12)):
        torch.testing.assert_close(reader(piece[rows]), straight(piece[rows]), atol=1e-6, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)


@pytest.mark.slow
@BATCHES
@NEW
def test_copies_and_files_continue_like_the_original(model, spec, lengths):
    reader = start(model, spec, lengths)
    decode(reader, 3, seed=5)
    twin = copy.deepcopy(reader.cache)
    file = io.BytesIO()
    torch.save(reader.cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.stats() == twin.stats() == reader.cache.stats()
    assert positions(loaded) == positions(twin) == positions(reader.cache)
    assert same(bits(loaded), bits(reader.cache))
    second = Reader(model, twin, reader.mask)
    second.started = True
    expected = decode(reader)
    assert same(decode(second), expected)
    assert positions(twin) == positions(reader.cache)


@BATCHES
@NEW
def test_questions_leave_a_frozen_cache_as_it_was(model, spec, lengths):
    reader = start(model, spec, lengths)
    before, where, stats = whole(reader.cache), positions(reader.cache), reader.cache.stats()

    def ask(seed: int) -> Tensor:
        mask, rows = reader.mask, len(lengths)
        with reader.cache.frozen():
            question = continuation(rows, 80, seed)
            logits = torch.cat(
                [reader(question[:, :70]), *map(reader, question[:, 70:].split(1, 1))], 1
            )
            assert reader.cache.get_seq_length() == 272
            reader.cache.crop(-80)
        reader.mask = mask
        return logits

    first = ask(1)
    assert not torch.equal(ask(2), first)
    assert torch.equal(ask(1), first)
    assert positions(reader.cache) == where and same(whole(reader.cache), before)
    assert reader.cache.stats() == stats


def whole(cache: kvfold.CompressedCache) -> list[Tensor]:
    """Copies of all keys and values, blocks and tails."""
    return [part.clone() for layer in cache.states for part in layer.store.dense()]


@pytest.mark.cases(2)
@pytest.mark.slow
@BATCHES
@RAGGED
def test_bytes_are_those_of_all_storages_alive(model, spec, lengths):
    reader = start(model, spec, lengths)
    reader.cache.tokenizer = None
    rows = len(lengths)
    for piece in (*pieces(rows, 3), *pieces(rows, 1)):
        assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
        reader(piece)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
    reader.cache.batch_repeat_interleave(2)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
