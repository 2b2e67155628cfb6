# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs against naive float64, interpreted where there is no GPU; outputs poisoned."""

import inspect

import pytest
import torch

from kvfold.kernels import dispatch, varlen
from kvfold.kernels import gather as rows_of
from kvfold.kernels import packing as store
from kvfold.kernels import swapped_qk as swapped
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.triton import (
    Splits,
    attend_to_packed,
    attend_to_rows,
    column_moments,
    column_sums,
    gather_rows,
    pack_keys,
    pack_values,
)
from kvfold.kernels.triton.quantized import BothPacked
from kvfold.kernels.views import Flat
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore
from tests.helpers.gpu_stand_ins import flash_stand_in, varlen_stand_in

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.2
LENGTHS = [0, 1, 63, 64, 65, 0, 300]
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
SIZES = pytest.mark.parametrize("size", [32, 64, 128])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
BITS = pytest.mark.parametrize("bits", [2, 4, 8])


@pytest.fixture(autouse=True)
def interpreter(request):
    if DEVICE == "cpu":
        request.getfixturevalue("interpreted")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel leaves unwritten shows."""

    def poisoned(allocate):
        def allocated(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(torch.nan if out.is_floating_point() else -1234567)

        return allocated

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def noise(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def assert_close(got, expected, dtype=torch.float32, tolerance=2e-6):
    tolerance = 2e-2 if dtype == torch.bfloat16 else tolerance
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def bent(logits, softcap):
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def attended(query, keys, values, softcap=None):
    """Output `[S, G, Dv]` and log-sum-exp `[S, G]` of a list of segments, in float64."""
    out = query.new_zeros(*query.shape[:2], values[0].shape[1], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64, device=query.device)
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        if len(key):
            logits = bent(query[i].double() @ key.double().T * SCALE, softcap)
            out[i] = logits.softmax(-1) @ value.double()
            lse[i] = logits.logsumexp(-1)
    return out, lse


# --- segments of plain entries -----------------------------------------------------------------


def segments(lengths, size, seed, dtype):
    return [noise(n, size, seed=seed + i, dtype=dtype) for i, n in enumerate(lengths)]


def starts_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=dtype)


@GROUPS
@SIZES
@DTYPES
def test_rows_are_attended_to_as_each_segment_alone(groups, size, dtype):
    keys, values = (segments(LENGTHS, size, seed, dtype) for seed in (100, 200))
    query = noise(len(LENGTHS), groups, size, seed=1, dtype=dtype)
    softcap = 2.0 if groups == 4 else None
    starts, splits = starts_of(LENGTHS, torch.int32), Splits.of(LENGTHS, 128, DEVICE)
    rows = torch.cat(keys), torch.cat(values)
    out, lse = attend_to_rows(query, *rows, starts, SCALE, softcap, splits=splits)
    expected = attended(query, keys, values, softcap)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1])


def test_segments_with_room_after_them():
    """Head sizes that differ and fill no power of two; splits for the room, half of it used."""
    room, used = [70, 200, 64, 128], [5, 130, 0, 128]
    keys, values = segments(room, 40, 100, torch.float32), segments(room, 24, 200, torch.float32)
    for key, value, n in zip(keys, values, used, strict=True):
        key[n:] = value[n:] = torch.nan
    query = noise(len(room), 3, 40, seed=1)
    starts = starts_of(room)[:-1]
    ends = starts + torch.tensor(used, device=DEVICE)
    splits = Splits.of(room, 64, DEVICE)
    rows = torch.cat(keys), torch.cat(values)
    out, lse = attend_to_rows(query, *rows, starts, SCALE, ends=ends, splits=splits)
    alive = ([part[:n] for part, n in zip(parts, used, strict=True)] for parts in (keys, values))
    expected = attended(query, *alive)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    again = attend_to_rows(query, *rows, starts, SCALE, ends=ends)
    assert_close(again[0], expected[0])


def test_nothing_to_attend_to():
    query, rows = noise(2, 4, 32, seed=1), noise(0, 32, seed=2)
    out, lse = attend_to_rows(query, rows, rows, starts_of([0, 0]), SCALE)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_large_logits_do_not_overflow():
    keys, values = segments([150], 32, 100, torch.float32), segments([150], 32, 200, torch.float32)
    query = 400 * noise(1, 4, 32, seed=1)
    out, lse = attend_to_rows(query, keys[0], values[0], starts_of([150]), SCALE)
    expected = attended(query, keys, values)
    assert_close(out, expected[0], tolerance=1e-3)
    assert_close(lse, expected[1], tolerance=1e-6)


def test_splits_cover_every_entry_once():
    lengths = [0, 1, 64, 65, 1000, 0, 100_000]
    for splits in (Splits.of(lengths), Splits.of(lengths, 64)):
        seen = torch.zeros(len(lengths), dtype=torch.int64)
        pairs = list(zip(splits.segment.tolist(), splits.part.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        for item, (segment, part) in enumerate(pairs):
            assert splits.first[segment] <= item < splits.first[segment + 1]
            seen[segment] += min(splits.size, lengths[segment] - part * splits.size)
        assert seen.tolist() == lengths
    assert len(Splits.of(lengths).segment) <= 512 + len(lengths)


# --- segments of packed entries ----------------------------------------------------------------

KEY_LENGTHS = [0, 32, 64, 96, 0, 320]
VALUE_LENGTHS = [0, 1, 63, 96, 40, 300]


def unpacked(words, bits, dim):
    """One number after the other, the lowest bits of a word first."""
    words = words if dim == 1 else words.T
    codes = [[(word >> shift) & (2**bits - 1) for word in row for shift in range(0, 32, bits)]
             for row in words.tolist()]  # fmt: skip
    codes = torch.tensor(codes, dtype=torch.float64).view(len(words), words.shape[1] * 32 // bits)
    return (codes if dim == 1 else codes.T).to(DEVICE)


def packed(lengths, size, bits, group, keys, dtype, seed):
    """Random words, scales and minima, and the numbers of each segment that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    per_word, of_scales = (32 // bits, group) if keys else (1, 1)
    wide = (size, size) if keys else (size * bits // 32, size // group)
    words = [
        torch.randint(-(2**31), 2**31, (n, wide[0]), generator=generator).int().to(DEVICE)
        for n in [n // per_word for n in lengths]
    ]
    counts = [n // of_scales for n in lengths]
    scale = [
        noise(n, wide[1], seed=seed + i, dtype=dtype).abs() / 2**bits for i, n in enumerate(counts)
    ]
    minimum = [noise(n, wide[1], seed=50 + seed + i, dtype=dtype) for i, n in enumerate(counts)]
    numbers = []
    for of_words, steps, lowest in zip(words, scale, minimum, strict=True):
        codes, along = unpacked(of_words, bits, 0 if keys else 1), 0 if keys else 1
        steps, lowest = (x.double().repeat_interleave(group, along) for x in (steps, lowest))
        numbers.append((codes * steps + lowest).to(dtype))
    kind = PackedKeys if keys else PackedValues
    return kind(Flat.of(words), Flat.of(scale), Flat.of(minimum), bits, group), numbers


def check_packed(keys, values, query, dtype, softcap=None, size=None, tolerance=4e-6):
    (packed_keys, key_numbers), (packed_values, value_numbers) = keys, values
    both = None
    if size is not None:
        lengths = list(map(min, packed_keys.lengths, packed_values.lengths))
        automatic = BothPacked.of(packed_keys.lengths, packed_values.lengths, DEVICE)
        starts = automatic.key_starts, automatic.value_starts, automatic.lengths
        both = BothPacked(*starts, Splits.of(lengths, size, DEVICE))
    out, lse = attend_to_packed(query, packed_keys, packed_values, SCALE, softcap, both=both)
    common = [
        (key[: len(value)], value[: len(key)])
        for key, value in zip(key_numbers, value_numbers, strict=True)
    ]
    expected = attended(query, *zip(*common, strict=True), softcap)
    assert_close(out, expected[0], dtype, tolerance)
    assert_close(lse, expected[1], tolerance=2e-2 if dtype == torch.bfloat16 else tolerance)


@GROUPS
@SIZES
@BITS
@DTYPES
def test_packed_entries_are_attended_to_as_the_numbers_they_stand_for(groups, size, bits, dtype):
    keys = packed(KEY_LENGTHS, size, bits, 32, True, dtype, 100)
    values = packed(VALUE_LENGTHS, size, bits, 32, False, dtype, 200)
    query = noise(len(KEY_LENGTHS), groups, size, seed=1, dtype=dtype)
    check_packed(keys, values, query, dtype, 2.0 if groups == 4 else None)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 8), (8, 2), (4, 2)])
def test_packed_differently(key_bits, value_bits):
    """Other groups than 32, other bits for keys and values, head sizes of no power of two."""
    keys = packed([128, 256, 0], 40, key_bits, 128, True, torch.float32, 100)
    values = packed([100, 300, 7], 48, value_bits, 16, False, torch.float32, 200)
    query = noise(3, 3, 40, seed=1)
    check_packed(keys, values, query, torch.float32, size=64, tolerance=2e-5)


def test_what_is_packed_in_keys_alone_is_not_looked_at():
    keys = packed([96], 32, 4, 32, True, torch.float32, 100)
    keys[0].scale.rows[2] = keys[0].minimum.rows[2] = torch.nan
    values = packed([60], 32, 4, 32, False, torch.float32, 200)
    check_packed(keys, values, noise(1, 4, 32, seed=1), torch.float32)


@SIZES
@BITS
@pytest.mark.parametrize("group", [32, 128])
def test_packing_is_that_of_plain_torch_to_the_bit(size, bits, group, monkeypatch):
    monkeypatch.setattr(store, "pack_path", lambda *_: "torch")
    rows = 3 * noise(2 * group, size, seed=bits)
    rows[:group, 3] = 0.7  # constant, in a group of keys
    rows[5] = -2.5  # and in those of values
    rows[:, 7] = torch.arange(2 * group, device=DEVICE) % (2 ** (bits + 1) - 1) / 2  # ties
    # On a GPU torch divides by a number as if it multiplied: the codes are those of a CPU.
    expected = PackedKeys.of([rows.cpu()], bits, group)
    check_same(pack_keys(rows, bits, group), expected)
    if size % group == 0:
        expected = PackedValues.of([rows.cpu()], bits, group)
        check_same(pack_values(rows, bits, group), expected)


def check_same(got, expected):
    for tensor, other in zip(got, expected.tensors(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor.cpu(), other)


@BITS
def test_packing_bfloat16_is_within_half_a_step(bits):
    rows = noise(64, 64, seed=bits, dtype=torch.bfloat16)
    for pack, kind in ((pack_keys, PackedKeys), (pack_values, PackedValues)):
        words, scale, minimum = pack(rows, bits, 32)
        lengths = [[len(x)] for x in (words, scale, minimum)]
        stored = map(Flat, (words, scale, minimum), lengths)
        error = (kind(*stored, bits, 32).segment(0).double() - rows.double()).abs()
        # A scale of 8 bits may fall short of the whole range by 2⁻⁸ of it.
        assert (error <= scale.max().double() * (0.5 + 2**bits / 2**8) + 0.02).all()


def test_what_the_store_packs_goes_through_the_kernel(monkeypatch):
    """Both kinds, and what is read back since an entry in the middle of a group."""
    segments = [noise(64, 32, seed=seed) for seed in range(3)]
    kinds = (PackedKeys, PackedValues)
    with monkeypatch.context() as patch:
        for reference in ("quantise", "pack"):
            patch.setattr(store, reference, None)
        of_kernel = [kind.of(segments, 4, 32) for kind in kinds]
    monkeypatch.setattr(store, "pack_path", lambda *_: "torch")
    expected = [kind.of([rows.cpu() for rows in segments], 4, 32) for kind in kinds]
    for mine, plain in zip(of_kernel, expected, strict=True):
        check_same(mine.tensors(), plain)
        for first in (0, 32, 41, 64):
            whole = torch.stack([mine.segment(i)[first:] for i in range(3)])
            assert torch.equal(mine.since(first), whole)


def test_packing_nothing():
    words, scale, minimum = pack_keys(noise(0, 32, seed=1), 4, 32)
    assert words.shape == (0, 32) and scale.shape == minimum.shape == (0, 32)


# --- column sums -------------------------------------------------------------------------------


def attention(query, key, softcap=None, visible=None):
    """Softmax rows `[B, Hq, S, T]` in float64, and the log-sum-exps of their logits."""
    queries, stored = query.shape[2], key.shape[2]
    keys = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = bent(query.double() @ keys.mT * SCALE, softcap)
    seen = torch.ones(queries, stored, dtype=torch.bool, device=DEVICE).tril(stored - queries)
    if visible is not None:
        seen = seen & visible[:, None, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1).float()


def check_columns(query, key, tolerance=2e-5, softcap=None, visible=None, counted=None):
    rows, lse = attention(query, key, softcap, visible)
    if counted is not None:
        rows = rows * counted[:, None, :, None]
    means = rows.unflatten(1, (key.shape[1], -1)).mean(2)
    given = {"scale": SCALE, "softcap": softcap, "visible": visible, "counted": counted}
    sums, squares = column_moments(query, key, lse, **given)
    assert_close(sums, means.sum(2), tolerance=tolerance)
    assert_close(squares, means.square().sum(2), tolerance=tolerance)
    assert torch.equal(column_sums(query, key, lse, **given), sums)


def asked(batch, heads, groups, queries, stored, size=32, dtype=torch.float32):
    """Queries and keys as models hand them out: views of larger buffers, the slack poisoned."""
    query = noise(batch, queries, heads * groups, size, seed=1, dtype=dtype).transpose(1, 2)
    key = noise(batch, heads, stored + 3, size, seed=2, dtype=dtype)
    key[:, :, stored:] = torch.nan
    return query, key[:, :, :stored]


@GROUPS
@DTYPES
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (63, 63), (65, 65), (5, 70), (64, 130)])
def test_column_sums(queries, stored, groups, dtype):
    check_columns(*asked(1, 2, groups, queries, stored, dtype=dtype))


@pytest.mark.parametrize("size", [40, 64, 128])
def test_column_sums_of_head_sizes(size):
    check_columns(*asked(2, 1, 2, 66, 70, size))


@pytest.mark.slow
@GROUPS
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_column_sums_of_padded_rows_and_counted_queries(groups, softcap):
    query, key = asked(2, 2, groups, 70, 75)
    visible = torch.ones(2, 75, dtype=torch.bool, device=DEVICE)
    visible[0, :30] = False  # the first queries of row 0 see nothing
    visible[1, 40] = False
    counted = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    counted[0, :40] = counted[1, 66:] = False
    check_columns(query, key, softcap=softcap, visible=visible, counted=counted)
    check_columns(query, key, softcap=softcap, visible=visible)
    check_columns(query, key, softcap=softcap, counted=counted)


# --- gathering ---------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("size", "value_size"), [(32, 32), (64, 24), (128, 128)])
def test_gathering_kept_entries(size, value_size, dtype):
    batch, heads, stored, width = 2, 3, 90, 70
    keys = noise(batch, heads, stored + 2, size, seed=1, dtype=dtype)[:, :, :stored]
    values = noise(batch, stored, heads, value_size, seed=2, dtype=dtype).transpose(1, 2)
    counts = [70, 0, 1, 33, 64, 32]
    slots = torch.full((batch * heads, width), -1, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for of_segment, n in zip(slots, counts, strict=True):
        chosen = torch.randperm(stored, generator=generator)[:n].sort().values
        of_segment[width - n :] = chosen.to(DEVICE)
    got = gather_rows(keys, values, slots.unflatten(0, (batch, heads)))
    for flat, rows in zip(got[:2], (keys, values), strict=True):
        expected = [
            rows[i // heads, i % heads, slot]
            for i, of_segment in enumerate(slots.tolist())
            for slot in of_segment
            if slot >= 0
        ]
        assert torch.equal(flat, torch.stack(expected))
    assert got[2].tolist() == starts_of(counts).tolist()


def test_segments_are_gathered_by_the_kernel(monkeypatch):
    """Holes, a broken block, and a segment without a whole one."""
    monkeypatch.setattr(rows_of, "_flat", None)
    keys, values = noise(1, 3, 60, 32, seed=1), noise(1, 3, 60, 32, seed=2)
    slots = torch.arange(10, 60, device=DEVICE).repeat(1, 3, 1)
    slots[0, 1, :40] = slots[0, 2, :18] = -1
    positions = torch.arange(60, device=DEVICE).expand(1, 3, -1)
    held = RaggedStore(keys, values, positions, slots, Encode())
    parts = (held.view().keys, keys), (held.view().values, values)
    for part, rows in parts:
        assert part.encoded.lengths == [48, 0, 32] and part.alive == [2, 10, 0]
        for i in range(3):
            expected = rows[0, i, slots[0, i][slots[0, i] >= 0]]
            assert torch.equal(torch.cat(part.pieces(i)), expected)


def test_gathering_nothing():
    rows = noise(1, 2, 5, 32, seed=1)
    keys, values, starts = gather_rows(rows, rows, torch.full((1, 2, 4), -1, device=DEVICE))
    assert keys.shape == values.shape == (0, 32) and starts.tolist() == [0, 0, 0]


@GROUPS
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:4]], ids=["seven", "four"])
def test_segments_folded_into_torchs_sequences(groups, lengths, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_stand_in)
    keys, values = (segments(lengths, 32, seed, torch.bfloat16) for seed in (100, 200))
    query = noise(len(lengths), groups, 32, seed=1, dtype=torch.bfloat16)
    rows = (torch.cat(part).cpu() for part in (keys, values))
    starts = starts_of(lengths, torch.int32).cpu()
    out, lse = varlen.attend_to_rows_varlen(query.cpu(), *rows, starts, max(lengths), SCALE)
    expected = attended(query, keys, values)
    assert_close(out, expected[0].cpu(), torch.bfloat16)
    assert_close(lse, expected[1].cpu())


def test_torchs_kernel_has_the_parameters_that_are_given():
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    given = inspect.signature(varlen_stand_in).parameters
    known = inspect.signature(varlen_attn).parameters
    assert all(known[name].kind == given[name].kind for name in given)


@GROUPS
@pytest.mark.parametrize("dtype", dispatch.HALF, ids=["f16", "bf16"])
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (65, 65), (7, 66), (1, 40)])
def test_column_sums_from_two_flash_passes(queries, stored, dtype, groups, monkeypatch):
    monkeypatch.setattr(swapped, "flash", flash_stand_in)
    query, key = (x.cpu() for x in asked(2, 2, groups, queries, stored, dtype=dtype))
    key = 3 * key
    value = noise(2, 2, stored, 32, seed=3, dtype=dtype).cpu()
    counted = torch.ones(2, queries, dtype=torch.bool)
    counted[0, queries // 2 :] = False
    rows, _ = attention(query.to(DEVICE), key.to(DEVICE))
    expected = rows.cpu() @ value.double().repeat_interleave(groups, 1)
    of_counted = rows.cpu() * counted[:, None, :, None]
    for votes, weights in ((None, rows.cpu()), (counted, of_counted)):
        out, sums = swapped.column_sums_from_two_flash_passes(
            query, key, value, scale=SCALE, counted=votes
        )
        assert_close(out, expected, dtype, 5e-3)
        received = weights.unflatten(1, (2, groups)).mean(2).sum(2)
        # One column of half precision would be a hundred times worse.
        torch.testing.assert_close(sums.double(), received, rtol=3e-5, atol=1e-9)


# --- who takes which path ----------------------------------------------------------------------


def test_paths_on_a_cpu(monkeypatch):
    query, rows = torch.zeros(1, 8, 1, 64), torch.zeros(2, 64)

    def paths():
        return [
            dispatch.rows_path(query, rows, softcap=None, masked=False),
            dispatch.packed_path(query, value_size=64, masked=False),
            dispatch.pack_path(rows, 32),
            dispatch.gather_path(query),
        ]

    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    assert paths() == ["torch"] * 4
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    assert paths() == ["triton"] * 4
    assert dispatch.rows_path(query, rows, softcap=None, masked=True) == "torch"
    assert dispatch.rows_path(query.double(), rows, softcap=None, masked=False) == "torch"
    assert (
        dispatch.rows_path(query.expand(1, 8, 2, 64), rows, softcap=None, masked=False) == "torch"
    )
    wide = torch.zeros(1, 8, 1, 256)
    assert dispatch.rows_path(wide, rows, softcap=None, masked=False) == "torch"
    assert dispatch.rows_path(wide.half(), rows, softcap=None, masked=False) == "triton"
    assert dispatch.pack_path(rows, 48) == "torch"
    options = {"softcap": None, "sinks": None, "masked": False, "squares": False}
    assert dispatch.columns_path(query, query, **options) == "torch"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert paths() == ["torch"] * 4


def test_paths_on_a_gpu(monkeypatch):
    """Only what is asked of tensors matters, so others will do."""

    class OnGpu:
        is_cuda, device = True, torch.device("cuda")

        def __init__(self, *shape, dtype=torch.bfloat16):
            self.shape, self.dtype = shape, dtype

    query, rows = OnGpu(1, 8, 1, 64), OnGpu(9, 64)
    plain = {"softcap": None, "masked": False}
    columns = {**plain, "sinks": None}
    assert dispatch.rows_path(query, rows, **plain) == "triton"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "triton"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert dispatch.rows_path(query, rows, **plain) == "varlen"
    assert dispatch.rows_path(query, OnGpu(9, 32), **plain) == "torch"
    assert dispatch.rows_path(query, rows, softcap=30.0, masked=False) == "torch"
    single = OnGpu(1, 8, 1, 64, dtype=torch.float32)
    assert dispatch.rows_path(single, rows, **plain) == "torch"
    assert dispatch.columns_path(query, rows, **columns, squares=False) == "flash"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "torch"
    large = OnGpu(1, 8, 1, 256)
    assert dispatch.columns_path(large, OnGpu(9, 256), **columns, squares=False) == "torch"
