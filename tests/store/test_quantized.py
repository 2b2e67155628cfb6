# SPDX-License-Identifier: Apache-2.0
"""Packed, pruned and paired entries against loops over single numbers, and their invariants."""

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError, parse
from kvfold.kernels.packing import PackedKeys, PackedValues, dequantise, pack, quantise, unpack
from kvfold.kernels.views import Flat
from kvfold.methods.observation import Observation
from kvfold.store.encoding import Encode
from kvfold.store.paired import Pairing, extend_pair, merge, retained
from kvfold.store.pruned import PrunedKeys, Pruning, channel_scores, kept_channels
from kvfold.store.quantized import Packing

SIZE, GROUP = 32, 16
BITS = pytest.mark.parametrize("bits", [2, 4, 8])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
PACKINGS = pytest.mark.parametrize("packed", [PackedKeys, PackedValues])
RAGGED = [48, 0, 16, 32]


def entries(lengths, dtype=torch.float32, seed=0, size=SIZE):
    """Segments `[n, size]` whose channels differ in size and offset, as keys' do."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.linspace(0.1, 9, size)
    return [
        (torch.randn(n, size, generator=generator) * loud + loud.flip(0)).to(dtype) for n in lengths
    ]


def of_pruned(segments):
    channels = torch.stack([torch.arange(i, 20 + i) for i in range(len(segments))]).int()
    return PrunedKeys.of(segments, channels)


def partners_of(segments):
    noise = entries([len(segment) for segment in segments], segments[0].dtype, seed=7)
    return [segment + 0.3 * other for segment, other in zip(segments, noise, strict=True)]


ENCODERS = {
    "flat": Flat.of,
    **{f"keys{b}": lambda x, b=b: PackedKeys.of(x, b, GROUP) for b in (2, 4, 8)},
    **{f"values{b}": lambda x, b=b: PackedValues.of(x, b, GROUP) for b in (2, 4, 8)},
    "pruned": of_pruned,
    "first": lambda x: Pairing().pair(x, partners_of(x))[0],
    "second": lambda x: Pairing().pair(partners_of(x), x)[1],
}
EVERY = pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)


def decoded(encoded):
    return [encoded.segment(i) for i in range(len(encoded.lengths))]


def assert_same(segments, expected):
    assert len(segments) == len(expected)
    for mine, theirs in zip(segments, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def nbytes(*encoded):
    storages = [t.untyped_storage() for one in encoded for t in one.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- what every encoding promises --------------------------------------------------------------


@EVERY
@DTYPES
def test_segments_decode_to_their_length_size_and_dtype(encode, dtype):
    segments = entries(RAGGED, dtype)
    encoded = encode(segments)
    assert encoded.lengths == RAGGED
    for segment, given_entries in zip(decoded(encoded), segments, strict=True):
        assert segment.shape == given_entries.shape
        assert segment.dtype == dtype
        assert segment.isfinite().all()


@BITS
def test_a_segment_does_not_depend_on_its_neighbours(bits):
    segments, partners = entries(RAGGED), entries(RAGGED, seed=1)

    def encoded(mine, theirs):
        packed = [PackedKeys.of(mine, bits, GROUP), PackedValues.of(mine, bits, GROUP)]
        return [*packed, *Pairing().pair(mine, theirs)]

    together = encoded(segments, partners)
    for i in range(len(RAGGED)):
        alone = encoded(segments[i : i + 1], partners[i : i + 1])
        assert_same([one.segment(i) for one in together], [one.segment(0) for one in alone])


@EVERY
def test_extending_appends_what_was_encoded_and_encodes_nothing_again(encode):
    old, new = encode(entries(RAGGED)), encode(entries([16, 32, 0, 64], seed=1))
    before = [t.clone() for t in old.tensors()]
    both = old.extended(new)
    assert both.lengths == [64, 32, 16, 96]
    parts = zip(decoded(old), decoded(new), strict=True)
    assert_same(decoded(both), [torch.cat(pair) for pair in parts])
    assert_same(old.tensors(), before)


@EVERY
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_selecting_copies_segments(encode, order):
    encoded = encode(entries(RAGGED))
    chosen = encoded.select(order)
    assert chosen.lengths == [RAGGED[i] for i in order]
    expected = [encoded.segment(i).clone() for i in order]
    for tensor in encoded.tensors():
        tensor.zero_()
    assert_same(decoded(chosen), expected)


@EVERY
def test_what_is_encoded_owns_its_memory(encode):
    segments = entries([32])
    encoded = encode(segments)
    before = encoded.segment(0).clone()
    segments[0].zero_()
    assert torch.equal(encoded.segment(0), before)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in encoded.tensors())


@EVERY
def test_nothing_at_all_is_encoded_and_extended(encode):
    nothing, some = encode(entries([0, 0])), encode(entries([32, 16]))
    assert nothing.lengths == [0, 0]
    assert [segment.shape for segment in decoded(nothing)] == [(0, SIZE)] * 2
    assert_same(decoded(nothing.extended(some)), decoded(some))
    assert_same(decoded(some.extended(nothing)), decoded(some))


# --- KIVI: codes -------------------------------------------------------------------------------


def naive_codes(numbers, bits):
    """Codes, scale and minimum of one group of floats."""
    low, high = min(numbers), max(numbers)
    scale = (high - low) / (2**bits - 1)
    codes = [0 if scale == 0 else round((x - low) / scale) for x in numbers]
    return codes, scale, low


def test_four_numbers_in_two_bits():
    x = torch.tensor([0, 1, 2, 3.3])
    codes, scale, minimum = quantise(x, 2, 0)
    assert codes.tolist() == [0, 1, 2, 3]
    assert scale.item() == pytest.approx(1.1)
    assert dequantise(codes, scale, minimum).tolist() == pytest.approx([0, 1.1, 2.2, 3.3])


def test_keys_are_quantised_per_channel_and_values_per_token():
    tokens = torch.tensor([[0.0, 10], [1, 10], [2, 10], [3, 14]])
    codes, scale, _ = quantise(tokens, 2, 0)
    assert codes.T.tolist() == [[0, 1, 2, 3], [0, 0, 0, 3]]
    assert scale[0].tolist() == pytest.approx([1, 4 / 3])
    codes, scale, _ = quantise(tokens, 2, 1)
    assert codes[0].tolist() == [0, 3]
    assert scale[[0, 3], 0].tolist() == pytest.approx([10 / 3, 11 / 3])


def test_halves_are_rounded_to_even():
    codes, _, _ = quantise(torch.tensor([0, 0.5, 1.5, 2.5, 3]), 2, 0)
    assert codes.tolist() == [0, 0, 2, 2, 3]


def test_the_first_code_is_in_the_low_bits():
    codes = torch.tensor([[0, 1, 2, 3] + [0] * 12], dtype=torch.uint8)
    assert pack(codes, 2, 1).tolist() == [[0b11100100]]
    assert pack(codes.T, 2, 0).tolist() == [[228]]


@BITS
@pytest.mark.parametrize("dim", [0, 1])
@given(st.integers(0, 3), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_packing_is_undone(bits, dim, words, other, rng):
    shape = [other, other]
    shape[dim] = words * 32 // bits
    codes = [[rng.randrange(2**bits) for _ in range(shape[1])] for _ in range(shape[0])]
    codes = torch.tensor(codes, dtype=torch.uint8).view(shape)
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.int32
    assert packed.shape[dim] == words
    assert torch.equal(unpack(packed, bits, dim), codes)


@pytest.mark.slow
@BITS
@PACKINGS
def test_packed_entries_are_those_of_a_loop(packed, bits):
    segments = entries(RAGGED, torch.float64)
    encoded = packed.of(segments, bits, GROUP)
    for i, segment in enumerate(segments):
        # Groups run down the columns of keys, and along the rows of values.
        lines = segment.T if packed is PackedKeys else segment
        restored = torch.zeros_like(lines)
        words = torch.zeros(len(lines), lines.shape[1] * bits // 32, dtype=torch.int64)
        for line in range(len(lines)):
            for start in range(0, lines.shape[1], GROUP):
                group = lines[line, start : start + GROUP].tolist()
                codes, scale, low = naive_codes(group, bits)
                for j, code in enumerate(codes, start):
                    restored[line, j] = code * scale + low
                    words[line, j * bits // 32] |= code << j * bits % 32
        if packed is PackedKeys:
            restored, words = restored.T, words.T
        assert torch.equal(encoded.words.segment(i), words.to(torch.int32))
        torch.testing.assert_close(encoded.segment(i), restored)


# --- KIVI: invariants --------------------------------------------------------------------------


@BITS
@DTYPES
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-2, 1e3), offset=st.floats(-1e3, 1e3))
@settings(max_examples=30, deadline=None)
def test_a_number_is_restored_within_half_a_step(bits, dtype, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(4, GROUP, generator=generator) * spread + offset).to(dtype)
    codes, scale, minimum = quantise(x, bits, 1)
    restored = dequantise(codes, scale, minimum).double()
    # The scale's rounding counts once per step, that of the result once.
    rounding = torch.finfo(dtype).eps * (2**bits * scale.double() + 2 * x.double().abs())
    assert ((restored - x.double()).abs() <= scale.double() / 2 + rounding).all()
    assert torch.equal(restored.amin(1), x.double().amin(1))
    for other in (-1, 1):
        others = (codes.int() + other).clamp(0, 2**bits - 1)
        errors = [
            (c * scale.double() + minimum.double() - x.double()).abs() for c in (codes, others)
        ]
        assert (errors[0] <= errors[1] + 1e-6 * x.double().abs().amax()).all()
    if dtype == torch.float32:
        assert ((restored.amax(1) - x.double().amax(1)).abs() <= rounding.amax(1)).all()


@pytest.mark.slow
@BITS
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-2, 1e3), offset=st.floats(-1e2, 1e2))
@settings(max_examples=30, deadline=None)
def test_quantising_what_was_restored_changes_no_code(bits, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, GROUP, generator=generator) * spread + offset
    codes, scale, minimum = quantise(x, bits, 1)
    again, _, _ = quantise(dequantise(codes, scale, minimum), bits, 1)
    assert torch.equal(again, codes)


@BITS
@DTYPES
@given(st.floats(-6e4, 6e4))
@example(0.1)
@settings(max_examples=10, deadline=None)
def test_a_constant_group_is_exact(bits, dtype, number):
    x = torch.full((2, GROUP), number).to(dtype)
    codes, scale, minimum = quantise(x, bits, 1)
    assert not codes.any() and not scale.any()
    assert torch.equal(dequantise(codes, scale, minimum), x)


@BITS
def test_constant_groups_among_others_are_exact(bits):
    keys, values = entries([32, 48])
    keys[16:, 3] = 0.7
    values[5, GROUP:] = -0.3
    assert torch.equal(PackedKeys.of([keys], bits, GROUP).segment(0)[16:, 3], keys[16:, 3])
    restored = PackedValues.of([values], bits, GROUP).segment(0)
    assert torch.equal(restored[5, GROUP:], values[5, GROUP:])


@BITS
@PACKINGS
@DTYPES
def test_chunks_give_the_codes_of_one_shot(packed, bits, dtype):
    segments = entries([96, 64], dtype)
    whole = packed.of(segments, bits, GROUP)
    chunked = packed.of([segment[:32] for segment in segments], bits, GROUP)
    first = [tensor.clone() for tensor in chunked.select([0]).tensors()]
    for start, stop in ((32, 48), (48, 96)):
        chunk = [segment[start:stop] for segment in segments]
        chunked = chunked.extended(packed.of(chunk, bits, GROUP))
    assert_same(chunked.tensors(), whole.tensors())
    for now, then in zip(chunked.tensors(), first, strict=True):
        assert torch.equal(now[: len(then)], then)


@BITS
@DTYPES
@PACKINGS
def test_packed_bytes_are_the_formula(packed, dtype, bits):
    encoded = packed.of(entries(RAGGED, dtype), bits, GROUP)
    numbers = sum(RAGGED) * SIZE
    width = torch.finfo(dtype).bits
    assert nbytes(encoded) == numbers * (bits + 2 * width / GROUP) / 8


# --- KIVI: what is packed when -----------------------------------------------------------------


@pytest.mark.parametrize("decoding", [False, True])
def test_keys_are_packed_in_blocks_and_values_one_by_one(decoding):
    packing = Packing(residual=128)
    for entries_, keys, values in ((0, 0, 0), (127, 0, 0), (128, 128, 0), (300, 256, 172)):
        assert packing.key_count(entries_, 0, decoding) == keys
        assert packing.value_count(entries_, 0, decoding) == values
    assert packing.key_count(200, 256, decoding) == 256
    assert packing.value_count(200, 100, decoding) == 100


def test_a_packing_packs_keys_and_values_in_their_bits():
    packing = Packing(key_bits=2, value_bits=8, group=GROUP, residual=32)
    segments = entries([32])
    keys, values = packing.keys(segments, None, None), packing.values(segments)
    assert isinstance(keys, PackedKeys) and keys.bits == 2
    assert isinstance(values, PackedValues) and values.bits == 8
    assert not packing.raw


def test_groups_must_fill_the_head_size():
    with pytest.raises(KvfoldError, match=r"groups of 32 .* head size 48"):
        Packing().values(entries([4], size=48))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_bits": 3}, "2, 4 or 8 bits, not 3"),
        ({"value_bits": 0}, "2, 4 or 8 bits, not 0"),
        ({"group": 12}, "multiple of 8"),
        ({"group": 8, "value_bits": 2}, "multiple of 16"),
        ({"group": 0}, "multiple of 8"),
        ({"residual": 48}, "multiple of 32"),
        ({"residual": 0}, "multiple of 32"),
    ],
)
def test_a_packing_refuses_what_cannot_be_packed(options, message):
    with pytest.raises(KvfoldError, match=message):
        Packing(**options)


# --- ThinK -------------------------------------------------------------------------------------


def watch(lengths, groups=2, seed=3):
    """Rows of 2 KV heads, `lengths` tokens each, padded on the left with loud nonsense."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, window, seen, size = len(lengths), 2, 8, 24, 8
    places = torch.arange(seen) - (seen - torch.tensor(lengths))[:, None]
    places = places.masked_fill(places < 0, -1)
    padding = (places < 0)[:, None, :, None]
    queries = torch.randn(batch, heads * groups, seen, size, generator=generator)
    keys = torch.randn(batch, heads, seen, size, generator=generator).masked_fill(padding, 40.0)
    return Observation(
        keys,
        keys,
        places[:, None].expand(batch, heads, seen),
        queries.masked_fill(padding, 40.0)[:, :, -window:],
        places[:, -window:],
    )


def brute_force_scores(queries, keys):
    """Mean over a group's queries `[G][W]` and the keys of (q_j · k_j)², for each channel."""
    pairs = [(q, k) for head in queries.tolist() for q in head for k in keys.tolist()]
    return [sum((q[j] * k[j]) ** 2 for q, k in pairs) / len(pairs) for j in range(keys.shape[1])]


def test_channels_of_the_golden_example():
    q = torch.tensor([[[[1.0, 2, 0, 1], [1, 0, 1, 1]]]])
    k = torch.tensor([[[[1.0, 1, 3, 0], [2, 0, 1, 1], [0, 1, 1, 2]]]])
    seen = Observation(k, k, torch.arange(3).view(1, 1, 3), q, torch.tensor([[1, 2]]))
    scores = channel_scores(seen, 32)
    assert scores[0, 0].tolist() == pytest.approx([10 / 6, 8 / 6, 11 / 6, 10 / 6])
    assert kept_channels(scores, 0.25).tolist() == [[[0, 2, 3]]]


@pytest.mark.parametrize("groups", [1, 4])
def test_scores_are_the_frobenius_norms_of_a_loop(groups):
    lengths = [24, 19, 5]  # the last row has less tokens than the window has queries
    seen = watch(lengths, groups)
    scores = channel_scores(seen, 6)
    for row, length in enumerate(lengths):
        for head in range(2):
            queries = seen.queries[row, head * groups : (head + 1) * groups]
            queries = queries[:, -min(6, length) :]
            expected = brute_force_scores(queries, seen.keys[row, head, -length:])
            assert scores[row, head].tolist() == pytest.approx(expected, rel=1e-5)


def test_of_equal_channels_the_earlier_stay():
    assert kept_channels(torch.ones(5), 0.4).tolist() == [0, 1, 2]
    assert kept_channels(torch.tensor([2.0, 1, 3, 1, 1]), 0.4).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("size", "ratio", "kept"), [(128, 0.4, 77), (32, 0.0, 32), (8, 0.99, 1)])
def test_the_number_of_channels_is_rounded_up(size, ratio, kept):
    assert len(kept_channels(torch.rand(size), ratio)) == kept


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_pruned_keys_are_zero_in_pruned_channels_only(ratio):
    seen = watch([24, 19])
    segments = [keys[-n:] for keys, n in zip(seen.keys.flatten(0, 1), (20, 3, 0, 15), strict=True)]
    pruned = Pruning(ratio=ratio, queries=6).keys(segments, seen, None)
    kept = kept_channels(channel_scores(seen, 6), ratio).flatten(0, 1).tolist()
    assert pruned.channels.tolist() == kept
    for i, keys in enumerate(segments):
        expected = torch.zeros_like(keys)
        for j in kept[i]:
            expected[:, j] = keys[:, j]
        assert torch.equal(pruned.segment(i), expected)
        assert ratio > 0 or torch.equal(expected, keys)


def test_logits_lose_just_the_pruned_channels():
    seen = watch([24])
    keys = seen.keys[0, 0]
    pruned = Pruning().keys(list(seen.keys[0]), seen, None)
    query, gone = seen.queries[0, 0, -1], torch.ones(8, dtype=torch.bool)
    gone[pruned.channels[0].long()] = False
    lost = keys[:, gone] @ query[gone]
    torch.testing.assert_close(pruned.segment(0) @ query, keys @ query - lost)


def test_channels_stay_once_they_are_chosen():
    pruning, first, later = Pruning(queries=8), watch([24]), watch([24], seed=4)
    fresh = pruning.keys(list(later.keys[0]), later, None)
    # Segment 1 has no pruned keys yet, so its channels are still open.
    earlier = pruning.keys([first.keys[0, 0], first.keys[0, 1, :0]], first, None)
    assert (earlier.channels != fresh.channels).any(1).all()
    new = pruning.keys(list(later.keys[0]), later, earlier)
    assert new.channels.tolist() == [earlier.channels[0].tolist(), fresh.channels[1].tolist()]
    both = earlier.extended(new)
    assert torch.equal(both.segment(0), torch.cat([earlier.segment(0), new.segment(0)]))
    assert torch.equal(both.segment(1), new.segment(1))


def test_recent_keys_and_generated_ones_stay_whole():
    pruning = Pruning(recent=32)
    for count in (pruning.key_count, pruning.value_count):
        assert count(100, 0, False) == 68
        assert count(20, 0, False) == 0
        assert count(100, 80, False) == 80
        assert count(500, 68, True) == 68
    assert not pruning.raw


@DTYPES
def test_pruning_saves_its_share_of_the_keys(dtype):
    segments = entries([100, 0, 60], dtype, size=128)
    channels = torch.arange(77, dtype=torch.int32).expand(3, 77).clone()
    keys, values = PrunedKeys.of(segments, channels), Pruning().values(segments)
    width = dtype.itemsize
    assert nbytes(keys) == 160 * 77 * width + 3 * 77 * 4
    assert nbytes(values) == 160 * 128 * width


@pytest.mark.parametrize(
    "options", [{"ratio": 1.0}, {"ratio": -0.1}, {"recent": -1}, {"queries": 0}]
)
def test_a_pruning_refuses_what_makes_no_sense(options):
    with pytest.raises(KvfoldError, match=str(next(iter(options.values())))):
        Pruning(**options)


# --- MiniCache: merging ------------------------------------------------------------------------


def vectors(n, seed=0, size=6):
    """Two layers' entries that are alike, as float64."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(n, size, generator=generator).double()
    return first, first * 1.5 + torch.randn(n, size, generator=generator).double()


def naive_direction(first, second, t):
    """SLERP of two lists of floats."""
    norms = [math.sqrt(sum(x * x for x in vector)) for vector in (first, second)]
    first, second = ([x / n for x in v] for v, n in zip((first, second), norms, strict=True))
    angle = math.acos(sum(a * b for a, b in zip(first, second, strict=True)))
    weights = [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]
    return [weights[0] * a + weights[1] * b for a, b in zip(first, second, strict=True)], norms


def test_the_direction_of_the_golden_example():
    first, second = torch.tensor([[3.0, 0, 0]]), torch.tensor([[0.0, 2, 0]])
    direction, *norms = merge(first, second, 0.6)
    assert direction[0].tolist() == pytest.approx([0.587785, 0.809017, 0], abs=1e-6)
    assert [norm.item() for norm in norms] == [3, 2]
    pair = Pairing(gamma=0.0).pair([first], [second])
    assert pair[0].segment(0)[0].tolist() == pytest.approx([1.763356, 2.427051, 0], abs=1e-6)
    assert pair[1].segment(0)[0].tolist() == pytest.approx([1.175571, 1.618034, 0], abs=1e-6)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.6, 1.0])
def test_directions_are_those_of_a_loop(t):
    first, second = vectors(20)
    direction, norm_first, norm_second = merge(first, second, t)
    for i in range(20):
        expected, norms = naive_direction(first[i].tolist(), second[i].tolist(), t)
        assert direction[i].tolist() == pytest.approx(expected, abs=1e-9)
        assert [norm_first[i].item(), norm_second[i].item()] == pytest.approx(norms)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(20).double())


def test_the_ends_are_the_layers_and_swapping_them_swaps_t():
    first, second = vectors(20)
    ends = [merge(first, second, t)[0] for t in (0.0, 1.0)]
    torch.testing.assert_close(ends[0], first / first.norm(dim=1, keepdim=True))
    torch.testing.assert_close(ends[1], second / second.norm(dim=1, keepdim=True))
    torch.testing.assert_close(merge(first, second, 0.6)[0], merge(second, first, 0.4)[0])


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_parallel_layers_are_restored(seed, factor, t):
    first = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    pair = Pairing(t=t, gamma=0.0).pair([first], [first * factor])
    torch.testing.assert_close(pair[0].segment(0), first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pair[1].segment(0), first * factor, rtol=1e-4, atol=1e-5 * factor)


@pytest.mark.parametrize("t", [0.0, 0.4, 0.5, 0.6, 1.0])
def test_opposite_and_zero_vectors_keep_their_length(t):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    first = torch.stack([x[0], torch.zeros(8), x[1], torch.zeros(8), x[2]])
    opposite = -2 * x[0] + 1e-4 * x[1]  # a great circle would lead away from both
    second = torch.stack([opposite, x[1], torch.zeros(8), torch.zeros(8), x[2] + 1e-5])
    pair = Pairing(t=t, gamma=0.0).pair([first], [second])
    for encoded, given_entries in zip(pair, (first, second), strict=True):
        restored = encoded.segment(0)
        assert restored.isfinite().all()
        torch.testing.assert_close(restored.norm(dim=1), given_entries.norm(dim=1))
        nearer = first[0] if t <= 0.5 else second[0]
        cosine = torch.nn.functional.cosine_similarity(restored[0], nearer, dim=0)
        assert cosine.item() == pytest.approx(1)
    torch.testing.assert_close(pair[0].segment(0)[2], x[1])
    torch.testing.assert_close(pair[1].segment(0)[1], x[1])


@DTYPES
def test_norms_are_kept(dtype):
    first, second = entries([50], dtype), entries([50], dtype, seed=1)
    for encoded, segments in zip(Pairing().pair(first, second), (first, second), strict=True):
        norms = segments[0].double().norm(dim=1)
        lengths = encoded.shared.rows.segment(0).double().norm(dim=1)
        torch.testing.assert_close(
            encoded.magnitudes.segment(0) * lengths, norms, rtol=1e-6, atol=0.0
        )
        rounding = max(torch.finfo(dtype).eps, 1e-6)
        restored = encoded.segment(0).double().norm(dim=1)
        torch.testing.assert_close(restored, norms, rtol=rounding, atol=0.0)


# --- MiniCache: retention ----------------------------------------------------------------------


@given(st.integers(0, 70), st.integers(0, 100))
@example(100, 7)
@settings(max_examples=30, deadline=None)
def test_the_entries_of_largest_angle_are_retained(n, percent):
    first, second = vectors(n, seed=n)
    at = retained(first, second, percent / 100).tolist()
    cosines = torch.nn.functional.cosine_similarity(first, second, dim=1).tolist()
    assert len(at) == -(-percent * n // 100)
    assert at == sorted(sorted(range(n), key=cosines.__getitem__)[: len(at)])


def test_opposite_entries_are_retained_first():
    first, second = vectors(40)
    second[11] = -3 * first[11]
    assert 11 in retained(first, second, 0.01).tolist()


@DTYPES
def test_retained_entries_are_exact_and_all_others_merged(dtype):
    first, second = entries([41, 0, 20], dtype), entries([41, 0, 20], dtype, seed=1)
    pair = Pairing(gamma=0.1).pair(first, second)
    for i in range(3):
        at = retained(first[i], second[i], 0.1)
        assert len(at) == math.ceil(len(first[i]) / 10)
        assert torch.equal(pair[0].segment(i)[at], first[i][at])
        assert torch.equal(pair[1].segment(i)[at], second[i][at])
        merged = torch.ones(len(first[i]), dtype=torch.bool)
        merged[at] = False
        directions = [pair[side].segment(i)[merged].double() for side in (0, 1)]
        cosines = torch.nn.functional.cosine_similarity(*directions, dim=1)
        torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-4)


# --- MiniCache: two layers, one memory ---------------------------------------------------------


def shared_of(pair):
    return {t.data_ptr() for t in pair[0].tensors()} & {t.data_ptr() for t in pair[1].tensors()}


@DTYPES
def test_a_pair_costs_the_formula(dtype):
    lengths = [100, 60]
    pair = Pairing().pair(entries(lengths, dtype), entries(lengths, dtype, seed=1))
    width, kept = dtype.itemsize, 5 + 3
    directions, magnitudes = 160 * SIZE * width, 2 * 160 * 4
    assert nbytes(*pair) == directions + magnitudes + kept * 4 + 2 * kept * SIZE * width
    assert len(shared_of(pair)) == 2


def test_a_pair_goes_on_sharing():
    pairing = Pairing(gamma=0.1)
    old = pairing.pair(entries([40, 30]), entries([40, 30], seed=1))
    new = pairing.pair(entries([20, 0], seed=2), entries([20, 0], seed=3))
    grown = extend_pair(*old, *new)
    assert len(shared_of(grown)) == 2
    assert len(shared_of(copy.deepcopy(grown))) == 2
    for side in (0, 1):
        assert_same(decoded(grown[side]), decoded(old[side].extended(new[side])))
    assert not shared_of((old[0].select([0]), old[1].select([0])))


def test_only_equal_segments_are_paired():
    with pytest.raises(KvfoldError, match="same entries"):
        Pairing().pair(entries([3]), entries([4]))


def test_a_turn_is_paired_whole_and_generated_entries_in_blocks():
    pairing = Pairing(block=64)
    for count in (pairing.key_count, pairing.value_count):
        assert count(100, 0, False) == 100
        assert count(163, 100, True) == 128
        assert count(120, 100, True) == 100
        assert count(10, 0, True) == 0
    assert pairing.pairs and not pairing.raw


@pytest.mark.parametrize(
    ("layers", "start", "paired"),
    [
        (4, 0.5, [2, 3]),
        (32, 0.5, list(range(16, 32))),
        (6, 0.5, [3, 4]),
        (5, 0.5, [2, 3]),
        (4, 0.0, [0, 1, 2, 3]),
        (1, 0.0, []),
        (4, 1.0, []),
    ],
)
def test_layers_are_paired_from_the_start_on(layers, start, paired):
    pairing = Pairing(start=start)
    of_layers = [pairing.of_layer(layer, layers) for layer in range(layers)]
    assert [layer for layer in range(layers) if of_layers[layer] is pairing] == paired
    assert of_layers.count(None) == layers - len(paired)


@pytest.mark.parametrize("options", [{"t": 1.5}, {"gamma": -0.1}, {"start": 2.0}, {"block": 0}])
def test_a_pairing_refuses_what_makes_no_sense(options):
    with pytest.raises(KvfoldError, match=str(next(iter(options.values())))):
        Pairing(**options)


# --- the methods -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "encode", "window"),
    [
        ("kivi", Packing(4, 4, 32, 128), 0),
        ("kivi:bits=2,group=16,residual=32", Packing(2, 2, 16, 32), 0),
        ("kivi:value_bits=8", Packing(4, 8, 32, 128), 0),
        ("kivi:bits=8,key_bits=2", Packing(2, 8, 32, 128), 0),
        ("think", Pruning(0.4, 32, 32), 32),
        ("think:ratio=0.5,recent=0,queries=8", Pruning(0.5, 0, 8), 8),
        ("minicache", Pairing(0.6, 0.05, 0.5, 64), 0),
        ("minicache:t=0.5,gamma=0,start=0.25,block=16", Pairing(0.5, 0.0, 0.25, 16), 0),
    ],
)
def test_a_method_names_how_entries_are_stored(spec, encode, window):
    stages = parse(spec).stages()
    assert stages.encode == encode
    assert isinstance(stages.encode, Encode)
    assert stages.needs.window == window
    assert stages.score is None
    assert not parse(spec).takes_budget


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kivi:bits=3", "bits, not 3"),
        ("kivi:residual=100", "not 100"),
        ("think:ratio=1", "not 1.0"),
        ("minicache:t=2", "not 2.0"),
        ("minicache:block=0", "not 0"),
    ],
)
def test_a_method_refuses_values_that_cannot_be_used(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec)
