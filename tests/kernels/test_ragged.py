# SPDX-License-Identifier: Apache-2.0
"""Heads of different lengths: the kernel against dense attention, caches against masked-dense."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import kvfold
from kvfold.kernels import dispatch, ragged
from kvfold.kernels.native.library import library
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.ragged import QUERIES, attend_to_segments
from kvfold.kernels.views import BLOCK, Encoded, Flat, PartView, RaggedView
from tests.helpers.caches import same
from tests.helpers.gpu_stand_ins import varlen_stand_in

SCALE = 0.3
BATCH, HEADS, SIZE = 2, 3, 8
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
# Entries of each segment before the newest: none, parts of blocks, whole ones, several.
OLD = [0, 5, BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 40]
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 1.3},
    "sink_logits": {"sink_logits": torch.linspace(-2, 2, 24, dtype=torch.float64)},
    "both": {"softcap": 1.3, "sink_logits": torch.linspace(-2, 2, 24, dtype=torch.float64)},
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
    gaps = tuple(width - n for n in tails)
    return PartView(encoded, buffer.unflatten(0, (BATCH, -1))[:, :, :width], gaps)


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
    sink_logits: Tensor | None = None,
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
            total = total + (0 if sink_logits is None else sink_logits[head].double().exp())
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


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize("old", [OLD, [40] * 6], ids=["ragged", "even"])
def test_a_bias_is_added_to_the_logits_of_its_entry(old, queries, options, groups):
    options = dict(options)
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"][: HEADS * groups]
    keys, values, held = stored(old, queries)
    biases = [noise(len(rows), 1, seed=i) for i, rows in enumerate(keys)]
    held = replace(held, bias=view(biases, [n % BLOCK + queries for n in old]))
    query = noise(BATCH, HEADS * groups, queries, SIZE, seed=3)
    hidden = later(queries).expand(BATCH, HEADS * groups, -1, -1)
    # An entry of bias b is one of the key (k, b / scale), for a query (q, 1).
    wide = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    wide_keys = [torch.cat([k, b / SCALE], -1) for k, b in zip(keys, biases, strict=True)]
    got = attend_to_segments(query, held, None, scale=SCALE, **options)
    if options.get("softcap") is None:
        assert_close(got, dense(wide, wide_keys, values, hidden, **options))
    else:  # the softcap bounds the logits, not the bias
        assert_close(got, _dense_with_bias(query, keys, values, hidden, biases, **options))


@pytest.mark.parametrize("path", ["triton", "varlen"])
def test_entries_with_a_bias_reach_no_kernel_that_knows_none(path, monkeypatch):
    """As on a GPU, where kernels would be chosen without it."""
    keys, values, held = stored([40] * 6, 1, torch.float32)
    query, called = noise(BATCH, HEADS, 1, SIZE, seed=3, dtype=torch.float32), []

    def kernel_for_plain_entries(*args: object) -> Tensor:
        called.append(path)
        return torch.zeros_like(query)

    monkeypatch.setattr(dispatch, "raw_path", lambda *args: "torch")
    monkeypatch.setattr(dispatch, "rows_path", lambda *args, **options: path)
    monkeypatch.setitem(ragged.PATHS, "rows", kernel_for_plain_entries)
    attend_to_segments(query, held, None, scale=SCALE)
    assert called == [path]
    biases = [noise(len(rows), 1, seed=i, dtype=torch.float32) for i, rows in enumerate(keys)]
    held = replace(held, bias=view(biases, [40 % BLOCK + 1] * 6))
    got = attend_to_segments(query, held, None, scale=SCALE)
    assert called == [path]
    wide = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    wide_keys = [torch.cat([k, b / SCALE], -1) for k, b in zip(keys, biases, strict=True)]
    hidden = later(1).expand(BATCH, HEADS, -1, -1)
    assert_close(got, dense(wide, wide_keys, values, hidden), 1e-5)


def _dense_with_bias(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    hidden: Tensor,
    biases: list[Tensor],
    softcap: float,
    sink_logits: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(*query.shape[:3], values[0].shape[1], dtype=torch.float64)
    for row in range(BATCH):
        for head in range(query.shape[1]):
            i = (row * query.shape[1] + head) // (query.shape[1] * BATCH // len(keys))
            logits = softcap * (query[row, head] @ keys[i].T * SCALE / softcap).tanh()
            gone = nn.functional.pad(hidden[row, head], (logits.shape[1] - hidden.shape[-1], 0))
            weights = (logits + biases[i][:, 0]).exp().masked_fill(gone, 0.0)
            total = weights.sum(-1, keepdim=True)
            total = total + (0 if sink_logits is None else sink_logits[head].exp())
            out[row, head] = weights / total @ values[i]
    return out


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
    if "sink_logits" in options:
        given["sink_logits"] = options["sink_logits"][:query_heads]
    got = attend_to_segments(query, segments, mask, scale=SCALE, **given)
    assert_close(got, dense(query, keys, values, hidden, **given))


@pytest.fixture(params=["native", pytest.param("triton", marks=pytest.mark.slow)])
def unpacking_nothing(request, monkeypatch):
    """In C++, and in Triton's interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    elif library() is None:
        pytest.skip("no C++ compiler")
    for elsewhere in ("blocks", "even"):
        monkeypatch.delitem(ragged.PATHS, elsewhere)


@GROUPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("old", "values_old"), [(64, 48), (32, 0), (0, 0)])
@pytest.mark.parametrize("path", ["native", "torch"])
def test_even_segments_are_attended_to_at_once(old, values_old, dtype, groups, path, monkeypatch):
    """Packed keys and values, each with an end of its own, or none encoded yet."""
    monkeypatch.delitem(ragged.PATHS, "blocks")
    if path == "native" and library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(dispatch, "packed_path", lambda *_, **__: path)
    query = noise(BATCH, HEADS * groups, 1, 16, seed=99, dtype=dtype)
    whole, parts = [], []
    for packed, count, seed in ((PackedKeys, old, 1), (PackedValues, values_old, 50)):
        rows = [noise(67, 16, seed=seed + i, dtype=dtype) for i in range(BATCH * HEADS)]
        encoded = packed.of([each[:count] for each in rows], 8, 16)
        whole.append([torch.cat([encoded.segment(i), r[count:]]) for i, r in enumerate(rows)])
        tail = [67 - count] * len(rows)
        parts.append(replace(view(rows, tail), encoded=encoded))
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE)
    hidden = later(1).expand(BATCH, HEADS * groups, -1, -1)
    assert_close(got, dense(query, *whole, hidden), 2e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.usefixtures("unpacking_nothing")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("lengths", "old", "values_old"),
    [
        ([67] * 6, [64] * 6, [40] * 6),
        ([67] * 6, [32] * 6, [48] * 6),
        ([67] * 6, [32] * 6, [0] * 6),
        ([67, 9, 130, 1, 67, 40], [64, 0, 112, 0, 48, 32], [40, 0, 100, 0, 60, 39]),
        ([9, 9, 130, 3, 9, 9], [0, 0, 128, 0, 0, 0], [0, 0, 2, 0, 0, 0]),
        ([3, 200, 1, 70, 20, 20], [0, 0, 0, 64, 16, 0], [0, 0, 0, 0, 0, 16]),
    ],
    ids=["keys first", "values first", "only keys", "uneven", "one long", "few packed"],
)
def test_what_is_packed_is_attended_to_as_it_is(lengths, old, values_old, options, monkeypatch):
    """Nothing is unpacked but what is packed in keys, or in values, alone."""
    given = {"softcap": options.get("softcap")}
    if "sink_logits" in options:
        given["sink_logits"] = options["sink_logits"][: HEADS * 4].float()
    query = noise(BATCH, HEADS * 4, 1, 16, seed=99, dtype=torch.float32)
    whole, parts = [], []
    for packed, counts, seed in ((PackedKeys, old, 1), (PackedValues, values_old, 50)):
        rows = [noise(n, 16, seed=seed + i, dtype=torch.float32) for i, n in enumerate(lengths)]
        first = [each[:n] for each, n in zip(rows, counts, strict=True)]
        encoded = packed.of(first, 4, 16)
        newest = [each[n:] for each, n in zip(rows, counts, strict=True)]
        whole.append([torch.cat([encoded.segment(i), new]) for i, new in enumerate(newest)])
        parts.append(replace(view(newest, [*map(len, newest)]), encoded=encoded))
        monkeypatch.setattr(packed, "rows", None)  # all of it at once
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE, **given)
    hidden = later(1).expand(BATCH, HEADS * 4, -1, -1)
    assert_close(got, dense(query, *whole, hidden, **given), 5e-6)


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.usefixtures("unpacking_nothing")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sinks", [0, 3])
def test_what_was_quantized_alone_is_attended_to_as_it_is(sinks, options, monkeypatch):
    """Nothing is decoded; sinks and the newest entries are raw."""
    given = {"softcap": options.get("softcap")}
    if "sink_logits" in options:
        given["sink_logits"] = options["sink_logits"][: HEADS * 4].float()
    query = noise(BATCH, HEADS * 4, 1, 16, seed=99, dtype=torch.float32)
    first, old, whole, parts = [sinks] * BATCH * HEADS, 50, [], []
    for seed, encode in (
        (1, lambda old: RotatedKeys.of(old, 4, True, first)),
        (50, lambda old: TokenValues.of(old, 4, first)),
    ):
        rows = [noise(67, 16, seed=seed + i, dtype=torch.float32) for i in range(BATCH * HEADS)]
        encoded = encode([each[:old] for each in rows])
        whole.append([torch.cat([encoded.segment(i), r[old:]]) for i, r in enumerate(rows)])
        parts.append(replace(view(rows, [67 - old] * len(rows)), encoded=encoded))
    for kind in (RotatedKeys, TokenValues):
        monkeypatch.setattr(kind, "decoded", None)
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE, **given)
    hidden = later(1).expand(BATCH, HEADS * 4, -1, -1)
    assert_close(got, dense(query, *whole, hidden, **given), 1e-5)


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.usefixtures("unpacking_nothing")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sinks", [0, 3])
def test_segments_quantized_alone_may_differ_in_length(sinks, options):
    lengths, tails = [40, 7, 90, 3, 40, 61], [4, 1, 9, 4, 2, 16]
    check_quantized_alone(lengths, tails, [sinks] * 6, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_segments_with_unequal_sinks_are_attended_to_too(options):
    """Also if all are equally long."""
    check_quantized_alone([40] * 6, [4] * 6, [3, 3, 2, 3, 3, 3], options)
    check_quantized_alone([40, 7, 90, 3, 40, 61], [4, 1, 9, 4, 2, 16], [3, 2, 0, 3, 1, 3], options)


def check_quantized_alone(lengths, tails, sinks, options):
    given = {"softcap": options.get("softcap")}
    if "sink_logits" in options:
        given["sink_logits"] = options["sink_logits"][: HEADS * 2].float()
    rows = [noise(n, 16, seed=i, dtype=torch.float32) for i, n in enumerate(lengths)]
    encoded = (RotatedKeys.of(rows, 4, True, sinks), TokenValues.of(rows, 4, sinks))
    newest = [noise(n, 16, seed=50 + i, dtype=torch.float32) for i, n in enumerate(tails)]
    parts = [replace(view(newest, tails), encoded=part) for part in encoded]
    query = noise(BATCH, HEADS * 2, 1, 16, seed=99, dtype=torch.float32)
    got = attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE, **given)
    whole = [
        [torch.cat([part.segment(i), new]) for i, new in enumerate(newest)] for part in encoded
    ]
    hidden = later(1).expand(BATCH, HEADS * 2, -1, -1)
    assert_close(got, dense(query, *whole, hidden, **given), 1e-5)


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("path", ["triton", "varlen"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("new", [1, 6])
def test_a_step_on_a_gpu_is_that_of_dense_entries(new, options, path, monkeypatch, request):
    """Triton interpreted; torch's kernel, which takes no softcap, with a stand-in."""
    given = {"softcap": options.get("softcap") if path == "triton" else None}
    if "sink_logits" in options:
        given["sink_logits"] = options["sink_logits"][: HEADS * 4].float()
    if path == "triton":
        request.getfixturevalue("interpreted")
    else:
        monkeypatch.setattr(dispatch, "rows_path", lambda *_, **__: "varlen")
        monkeypatch.setattr(ragged, "varlen_attn", varlen_stand_in)
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
@pytest.mark.parametrize(
    "options", [OPTIONS["plain"], OPTIONS["sink_logits"]], ids=["plain", "sink_logits"]
)
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
    tails = replace(view(keys, tail), encoded=packed)
    mixed = RaggedView(tails, segments.values, queries)
    rounded = [torch.cat([packed.segment(i), rows[-queries:]]) for i, rows in enumerate(keys)]
    hidden = later(queries).expand(BATCH, HEADS * 4, -1, -1)
    got = attend_to_segments(query, mixed, None, scale=SCALE)
    assert_close(got, dense(query, rounded, values, hidden))
    newest = [[rows[len(rows) - queries :] for rows in part] for part in (keys, values)]
    bare = RaggedView(*(replace(view(part, tail), encoded=None) for part in newest), queries)
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


def whole(cache: kvfold.CompressedCache) -> list[Tensor]:
    """Copies of all keys and values, blocks and tails."""
    return [part.clone() for layer in cache.states for part in layer.store.dense()]
