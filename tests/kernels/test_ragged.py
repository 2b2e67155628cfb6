# SPDX-License-Identifier: Apache-2.0
"""Heads of different lengths: the kernel against dense attention, caches against masked-dense."""

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
from kvfold.generation.generate import read_turn
from kvfold.kernels import ragged as kernel
from kvfold.kernels import varlen
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.ragged import QUERIES, attend_to_segments
from kvfold.kernels.views import BLOCK, Encoded, Flat, PartView, RaggedView
from tests.helpers.budgets import compressed
from tests.helpers.caches import bits, counted_bytes, positions, reachable_bytes, same
from tests.helpers.exactness import FLOAT32_ONLY, kernel_spread, pieces
from tests.helpers.gpu_stand_ins import varlen_stand_in
from tests.helpers.models import FAMILIES, build, continuation
from tests.helpers.models import prompts as random_prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

# --- the kernel --------------------------------------------------------------------------------

SCALE = 0.3
BATCH, HEADS, SIZE = 2, 3, 8
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
# Entries of each segment before the newest: none, parts of blocks, whole ones, several.
OLD = [0, 5, BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 40]
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 1.3},
    "sinks": {"sinks": torch.linspace(-2, 2, 24, dtype=torch.float64)},
    "both": {"softcap": 1.3, "sinks": torch.linspace(-2, 2, 24, dtype=torch.float64)},
}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def view(entries: list[Tensor], tails: list[int]) -> PartView:
    """Segments of whole blocks and a tail, in a buffer with nonsense wherever nothing is stored."""
    encoded = Flat.of([rows[: len(rows) - n] for rows, n in zip(entries, tails, strict=True)])
    size, width = entries[0].shape[1], max(tails)
    buffer = torch.full((len(tails), width + 3, size), torch.nan, dtype=entries[0].dtype)
    buffer[:, :width] = 1e4
    for into, rows, n in zip(buffer, entries, tails, strict=True):
        into[width - n : width] = rows[len(rows) - n :]
    return PartView(encoded, buffer.unflatten(0, (BATCH, -1))[:, :, :width], tails)


def stored(
    old: list[int], new: int, dtype: torch.dtype = torch.float64, sizes: tuple[int, int] = (8, 8)
) -> tuple[list[Tensor], list[Tensor], RaggedView]:
    """Keys and values of segments of `old` and `new` entries each, and what holds them."""
    lengths = [n + new for n in old]
    tails = [n % BLOCK + new for n in old]
    keys, values = (
        [noise(n, size, seed=10 * i + j, dtype=dtype) for i, n in enumerate(lengths)]
        for j, size in enumerate(sizes)
    )
    return keys, values, RaggedView(view(keys, tails), view(values, tails), new)


def dense(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    hidden: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One row and query head at a time, in float64; `hidden [B, Hq, S, n]` are last entries."""
    batch, query_heads, queries, _ = query.shape
    groups = query_heads * batch // len(keys)
    out = torch.zeros(batch, query_heads, queries, values[0].shape[1], dtype=torch.float64)
    for row in range(batch):
        for head in range(query_heads):
            i = (row * query_heads + head) // groups
            logits = query[row, head].double() @ keys[i].double().T * SCALE
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            gone = nn.functional.pad(hidden[row, head], (logits.shape[1] - hidden.shape[-1], 0))
            weights = logits.exp().masked_fill(gone, 0.0)
            total = weights.sum(-1, keepdim=True)
            total = total + (0 if sinks is None else sinks[head].double().exp())
            out[row, head] = (weights / total.clamp(min=1e-300)) @ values[i].double()
    return out


def later(queries: int) -> Tensor:
    """Which of its own columns a block of queries must not see yet `[S, S]`."""
    return torch.arange(queries) > torch.arange(queries)[:, None]


def some_hidden(query_heads: int, queries: int, new: int) -> Tensor:
    """A causal `hidden [B, Hq, S, new]` with holes; every query sees its own column."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.rand(BATCH, query_heads, queries, new, generator=generator) < 0.4
    own = torch.arange(new - queries, new)
    return (hidden | (torch.arange(new) > own[:, None])).masked_fill(
        torch.arange(new) == own[:, None], False
    )


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """As transformers writes masks: the most negative number, not −∞."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@GROUPS
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "bool per head", "additive per head"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 12])
def test_segments_are_attended_to_as_dense_entries_are(queries, options, kind, groups):
    query_heads, new = HEADS * groups, queries + (0 if kind == "none" else 5)
    query = noise(BATCH, query_heads, queries, SIZE, seed=99)
    keys, values, segments = stored(OLD, new)
    hidden = later(queries).expand(BATCH, query_heads, -1, -1)
    mask = None
    if kind != "none":
        heads = query_heads if "per head" in kind else 1
        hidden = some_hidden(heads, queries, new)
        mask = ~hidden if "bool" in kind else additive(hidden, torch.float64)
        hidden = hidden.expand(-1, query_heads, -1, -1)
        assert hidden.any()
    given = dict(options)
    if "sinks" in options:
        given["sinks"] = options["sinks"][:query_heads]
    got = attend_to_segments(query, segments, mask, scale=SCALE, **given)
    assert_close(got, dense(query, keys, values, hidden, **given))


@GROUPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("old", "values_old"), [(64, 48), (32, 0), (0, 0)])
def test_even_segments_are_attended_to_at_once(old, values_old, dtype, groups, monkeypatch):
    """Packed keys and values, each with an end of its own, or none encoded yet."""
    monkeypatch.setattr(kernel, "_in_blocks", None)
    query = noise(BATCH, HEADS * groups, 1, 16, seed=99, dtype=dtype)
    whole, parts = [], []
    for packed, count, seed in ((PackedKeys, old, 1), (PackedValues, values_old, 50)):
        rows = [noise(67, 16, seed=seed + i, dtype=dtype) for i in range(BATCH * HEADS)]
        encoded = packed.of([each[:count] for each in rows], 8, 16)
        whole.append([torch.cat([encoded.segment(i), r[count:]]) for i, r in enumerate(rows)])
        tail = [67 - count] * len(rows)
        parts.append(PartView(encoded, view(rows, tail).tail, tail))
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE)
    hidden = later(1).expand(BATCH, HEADS * groups, -1, -1)
    assert_close(got, dense(query, *whole, hidden), 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("old", "values_old"), [(64, 40), (32, 48), (32, 0)])
def test_what_is_packed_is_attended_to_as_it_is(old, values_old, options, monkeypatch):
    """Triton interpreted: nothing is unpacked but what is packed in keys, or in values, alone."""
    for elsewhere in ("_in_blocks", "_one_step_even"):
        monkeypatch.setattr(kernel, elsewhere, None)
    given = {"softcap": options.get("softcap")}
    if "sinks" in options:
        given["sinks"] = options["sinks"][: HEADS * 4].float()
    query = noise(BATCH, HEADS * 4, 1, 16, seed=99, dtype=torch.float32)
    whole, parts = [], []
    for packed, count, seed in ((PackedKeys, old, 1), (PackedValues, values_old, 50)):
        rows = [noise(67, 16, seed=seed + i, dtype=torch.float32) for i in range(BATCH * HEADS)]
        encoded = packed.of([each[:count] for each in rows], 4, 16)
        whole.append([torch.cat([encoded.segment(i), r[count:]]) for i, r in enumerate(rows)])
        tail = [67 - count] * len(rows)
        parts.append(PartView(encoded, view(rows, tail).tail, tail))
        monkeypatch.setattr(packed, "rows", None)  # all of it at once
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE, **given)
    hidden = later(1).expand(BATCH, HEADS * 4, -1, -1)
    assert_close(got, dense(query, *whole, hidden, **given), 5e-6)


@pytest.mark.parametrize("path", ["triton", "varlen"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("new", [1, 6])
def test_a_step_on_a_gpu_is_that_of_dense_entries(new, options, path, monkeypatch, request):
    """Triton interpreted; torch's kernel, which takes no softcap, with a stand-in."""
    given = {"softcap": options.get("softcap") if path == "triton" else None}
    if "sinks" in options:
        given["sinks"] = options["sinks"][: HEADS * 4].float()
    if path == "triton":
        request.getfixturevalue("interpreted")
    else:
        monkeypatch.setattr(kernel, "rows_path", lambda *_, **__: "varlen")
        monkeypatch.setattr(varlen, "varlen_attn", varlen_stand_in)
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=99, dtype=torch.float32)
    keys, values, segments = stored(OLD, new, torch.float32)
    got = attend_to_segments(query, segments, None, scale=SCALE, **given)
    hidden = torch.zeros(BATCH, HEADS * 4, 1, new, dtype=torch.bool)
    assert_close(got, dense(query, keys, values, hidden, **given), 5e-6)


@GROUPS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [QUERIES, QUERIES + 1, 2 * QUERIES + 7])
def test_blocks_of_many_queries(queries, masked, groups):
    query = noise(BATCH, HEADS * groups, queries, SIZE, seed=99)
    keys, values, segments = stored(OLD, queries)
    hidden = some_hidden(1, queries, queries) if masked else later(queries)
    hidden = hidden.expand(BATCH, HEADS * groups, -1, -1)
    mask = ~hidden[:, :1] if masked else None
    got = attend_to_segments(query, segments, mask, scale=SCALE)
    assert_close(got, dense(query, keys, values, hidden))


@pytest.mark.parametrize("old", [[0] * 6, [7] * 6, [BLOCK] * 6, [0, 0, 0, 300, 0, 1]], ids=str)
@pytest.mark.parametrize("queries", [1, 12])
def test_equal_empty_and_lonely_segments(queries, old):
    query = noise(BATCH, HEADS * 4, queries, SIZE, seed=99)
    keys, values, segments = stored(old, queries)
    hidden = later(queries).expand(BATCH, HEADS * 4, -1, -1)
    got = attend_to_segments(query, segments, None, scale=SCALE)
    assert_close(got, dense(query, keys, values, hidden))


def test_values_of_another_size():
    for queries in (1, 12):
        query = noise(BATCH, HEADS * 4, queries, SIZE, seed=99)
        keys, values, segments = stored(OLD, queries, sizes=(8, 6))
        hidden = later(queries).expand(BATCH, HEADS * 4, -1, -1)
        got = attend_to_segments(query, segments, None, scale=SCALE)
        assert_close(got, dense(query, keys, values, hidden))


def test_a_mask_that_hides_nothing_is_none():
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=99)
    _, _, segments = stored(OLD, 4)
    expected = attend_to_segments(query, segments, None, scale=SCALE)
    nothing = torch.zeros(BATCH, 1, 1, 4, dtype=torch.bool)
    for mask in (~nothing, additive(nothing, torch.float64)):
        assert torch.equal(attend_to_segments(query, segments, mask, scale=SCALE), expected)


@pytest.mark.parametrize("old", [[0] * 6, [0, BLOCK, 5, 0, 2 * BLOCK, BLOCK]], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["sinks"]], ids=["plain", "sinks"])
@pytest.mark.parametrize("new", [0, 3])
def test_a_query_that_sees_nothing_answers_with_zeros(new, options, old):
    """A segment may be empty, or hold only what is hidden; in others the tail may be empty."""
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=99)
    given = {k: v[: HEADS * 4] for k, v in options.items()}
    keys, values, segments = stored(old, new)
    hidden = torch.ones(BATCH, HEADS * 4, 1, new, dtype=torch.bool)
    expected = dense(query, keys, values, hidden, **given)
    empty = [i for i, n in enumerate(old) if n == 0]
    for mask in (~hidden, torch.zeros(hidden.shape).double().masked_fill(hidden, -torch.inf)):
        got = attend_to_segments(query, segments, mask, scale=SCALE, **given)
        assert_close(got, expected)
        assert got.unflatten(1, (HEADS, 4)).flatten(0, 1)[empty].eq(0).all()
    assert len(empty) == 6 or expected.ne(0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 12])
def test_long_segments_add_up_in_every_dtype(queries, dtype):
    """Off by about one rounding of the result, and of float32 sums, however many there are."""
    old = [4000, 0, 5, 1000, BLOCK, 2000]
    query = noise(BATCH, HEADS * 4, queries, SIZE, seed=99, dtype=dtype)
    keys, values, segments = stored(old, queries, dtype)
    hidden = later(queries).expand(BATCH, HEADS * 4, -1, -1)
    got = attend_to_segments(query, segments, None, scale=SCALE)
    assert got.dtype == dtype
    expected = dense(query, keys, values, hidden)
    off = (got.double() - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
    assert off.max() <= max(2e-6, 1.25 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("queries", [1, 12])
def test_encoded_and_missing_segments_are_read_too(queries):
    """Packed keys beside whole values with ends of their own, and tails without anything before."""
    query = noise(BATCH, HEADS * 4, queries, SIZE, seed=99)
    keys, values, segments = stored([16 * n for n in range(6)], queries)
    tail = [queries] * 6
    packed: Encoded = PackedKeys.of([rows[: len(rows) - queries] for rows in keys], 8, 16)
    tails = view(keys, tail)
    mixed = RaggedView(PartView(packed, tails.tail, tail), segments.values, queries)
    rounded = [torch.cat([packed.segment(i), rows[-queries:]]) for i, rows in enumerate(keys)]
    hidden = later(queries).expand(BATCH, HEADS * 4, -1, -1)
    got = attend_to_segments(query, mixed, None, scale=SCALE)
    assert_close(got, dense(query, rounded, values, hidden))
    newest = [[rows[len(rows) - queries :] for rows in part] for part in (keys, values)]
    bare = RaggedView(*(PartView(None, view(part, tail).tail, tail) for part in newest), queries)
    got = attend_to_segments(query, bare, None, scale=SCALE)
    assert_close(got, dense(query, *newest, hidden))


@pytest.mark.parametrize("queries", [1, 12])
def test_inputs_are_left_as_they_were(queries):
    query = noise(BATCH, HEADS * 4, queries, SIZE, seed=99)
    _, _, segments = stored(OLD, 20)
    mask = additive(some_hidden(1, queries, 20), torch.float64)
    parts = (segments.keys, segments.values)
    tensors = [query, mask, *(t for p in parts for t in (p.encoded.rows, p.tail))]
    before = [t.clone() for t in tensors]
    for given in (None, mask):
        attend_to_segments(query, segments, given, scale=SCALE, softcap=2.0)
    assert same(tensors, before)


# --- caches ------------------------------------------------------------------------------------

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


# --- however they are read, copied, saved ------------------------------------------------------


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


# --- what they cost ----------------------------------------------------------------------------


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
