# SPDX-License-Identifier: Apache-2.0
"""Kernels: the reference against torch and a naive loop, the fast path against the reference."""

import math

import pytest
import torch
import torch.nn.functional as F

from kvfold.kernels import column_sums as columns
from kvfold.kernels import query_blocks as chunked
from kvfold.kernels import reference
from kvfold.kernels import swapped_qk as swapped
from tests.helpers.gpu_stand_ins import flash_stand_in

KERNELS = pytest.mark.parametrize("kernel", [reference, chunked], ids=["reference", "chunked"])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
SCALE = 0.3


def inputs(queries, stored, groups=2, dtype=torch.float64, batch=2, heads=2):
    """Query, key and value as the cache hands them out: views of buffers with poisoned slack."""
    generator = torch.Generator().manual_seed(100 * queries + stored)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = noise(batch, queries, heads * groups, 8).transpose(1, 2)
    key, value = noise(batch, heads, stored + 5, 8), noise(batch, heads, stored + 5, 6)
    key[:, :, stored:] = value[:, :, stored:] = torch.nan
    return query, key[:, :, :stored], value[:, :, :stored]


def causal(queries, stored):
    """Which keys each query sees, the last query all of them."""
    return torch.arange(stored) <= torch.arange(stored - queries, stored)[:, None]


def random_mask(batch, heads, queries, stored):
    """A causal mask with holes; row 0 is left-padded, so that its first queries see nothing."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(batch, heads, queries, stored, generator=generator) < 0.7
    mask = mask & causal(queries, stored)
    mask[0, :, :, : stored - queries + 2] = False
    return mask


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def assert_same(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        assert a.isfinite().all()
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def naive(query, key, value, mask, softcap=None, sinks=None, counted=None):
    """One query head, one query, one key at a time, in python floats."""
    batch, query_heads, queries, _ = query.shape
    heads, stored = key.shape[1:3]
    groups = query_heads // heads
    out = torch.zeros(batch, query_heads, queries, value.shape[-1], dtype=torch.float64)
    received = torch.zeros(batch, heads, queries, stored, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            for i in range(queries):
                weights = []
                for j in range(stored):
                    logit = float(query[b, h, i] @ key[b, h // groups, j]) * SCALE
                    logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
                    weights.append(math.exp(logit) if mask[b, h, i, j] else 0.0)
                total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[h]))
                for j in range(stored if total else 0):
                    share = weights[j] / total
                    out[b, h, i] += share * value[b, h // groups, j]
                    if counted is None or counted[b, i]:
                        received[b, h // groups, i, j] += share / groups
    return out, received.sum(2), (received**2).sum(2)


# --- the truth ---------------------------------------------------------------------------------


@KERNELS
def test_causal_column_sums_golden(kernel):
    query = torch.tensor([[[[1.0, 0], [0, 1], [1, 1]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0, 0], [0, 2], [1, 1]]]], dtype=torch.float64)
    value = torch.eye(3, dtype=torch.float64)[None, None]
    rows, sums = kernel.attend_with_column_sums(query, key, value, None, scale=2**-0.5)
    # With one-hot values the output is the attention itself.
    golden = [1, 0, 0, 0.195570, 0.804430, 0, 0.197776, 0.401112, 0.401112]
    assert rows.flatten().tolist() == pytest.approx(golden, abs=1e-6)
    assert sums.flatten().tolist() == pytest.approx([1.393346, 1.205542, 0.401112], abs=1e-6)
    assert sums.sum().item() == pytest.approx(3, abs=1e-12)
    assert sums.var().item() == pytest.approx(0.277818, abs=1e-6)


@KERNELS
def test_squares_give_the_golden_deviations(kernel):
    rows = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.5, 0.3]], dtype=torch.float64)
    key = torch.eye(3, dtype=torch.float64)[None, None]
    query = rows.log().clamp(min=-9)[None, None]
    _, sums, squares = kernel.attend_with_moments(query, key, key, None, scale=1.0)
    seen_by = torch.tensor([3, 2, 1])
    mean = sums[0, 0] / seen_by
    deviation = (squares[0, 0] / seen_by - mean**2).clamp(min=0).sqrt()
    assert mean.tolist() == pytest.approx([0.566667, 0.5, 0.3], abs=1e-6)
    assert deviation.tolist() == pytest.approx([0.329983, 0, 0], abs=1e-6)


@GROUPS
@pytest.mark.parametrize(("queries", "stored"), [(17, 17), (5, 17), (1, 17)])
def test_reference_attends_as_torch_does(groups, queries, stored):
    query, key, value = inputs(queries, stored, groups)
    mask = causal(queries, stored)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    for given in (None, mask[None, None], additive(mask, torch.float64)[None, None]):
        out, _ = reference.attend_with_column_sums(query, key, value, given, scale=SCALE)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@KERNELS
@GROUPS
def test_every_option_at_once_is_the_naive_loop(kernel, groups):
    query, key, value = inputs(6, 9, groups)
    mask = random_mask(2, 2 * groups, 6, 9)
    sinks = torch.linspace(-1, 2, 2 * groups, dtype=torch.float64)
    counted = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], dtype=torch.bool)
    options = {"softcap": 1.2, "sinks": sinks, "counted": counted}
    expected = naive(query, key, value, mask, **options)
    for given in (mask, additive(mask, torch.float64)):
        got = kernel.attend_with_moments(query, key, value, given, scale=SCALE, **options)
        assert_same(got, expected, 1e-10)


@KERNELS
@pytest.mark.parametrize("option", ["softcap", "sinks", "counted", "mask"])
def test_each_option_alone_is_the_naive_loop(kernel, option):
    query, key, value = inputs(6, 9, groups=2)
    mask = causal(6, 9).expand(2, 4, 6, 9)
    options = {
        "softcap": {"softcap": 0.8},
        "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)},
        "counted": {"counted": torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()},
        "mask": {},
    }[option]
    if option == "mask":
        mask = random_mask(2, 4, 6, 9)
    expected = naive(query, key, value, mask, **options)
    given = mask if option == "mask" else None
    got = kernel.attend_with_moments(query, key, value, given, scale=SCALE, **options)
    assert_same(got, expected, 1e-10)


@KERNELS
@GROUPS
@pytest.mark.parametrize("masked", [False, True])
def test_sums_are_the_same_without_squares(kernel, masked, groups):
    query, key, value = inputs(130, 150, groups)
    mask = random_mask(2, 1, 130, 150) if masked else None
    counted = torch.arange(130).expand(2, -1) % 3 > 0
    options = {"scale": SCALE, "counted": counted}
    *expected, _ = kernel.attend_with_moments(query, key, value, mask, **options)
    got = kernel.attend_with_column_sums(query, key, value, mask, **options)
    assert_same(got, expected, 1e-12)


@KERNELS
def test_a_query_that_sees_nothing_answers_with_zeros(kernel):
    query, key, value = inputs(6, 9)
    mask = random_mask(2, 4, 6, 9)
    blind = ~mask.any(-1)
    assert blind.any() and not blind.all()
    out, sums = kernel.attend_with_column_sums(query, key, value, mask, scale=SCALE)
    assert out[blind].eq(0).all()
    assert out[~blind].ne(0).any(-1).all()
    assert sums[0, :, :5].eq(0).all()
    seeing = (~blind).unflatten(1, (2, 2)).double().mean(2).sum(-1)
    torch.testing.assert_close(sums.sum(-1), seeing, rtol=0, atol=1e-12)


# --- chunked against the reference -------------------------------------------------------------


@DTYPES
@GROUPS
@pytest.mark.parametrize(
    ("queries", "stored"),
    [(n, n) for n in (1, 63, 64, 65, 130, 200)] + [(1, 200), (63, 65), (65, 130), (130, 200)],
)
def test_chunked_is_the_reference(queries, stored, groups, dtype, tolerance):
    query, key, value = inputs(queries, stored, groups, dtype)
    expected = reference.attend_with_moments(query, key, value, None, scale=SCALE)
    got = chunked.attend_with_moments(query, key, value, None, scale=SCALE)
    assert_same(got, expected, tolerance)


@DTYPES
@GROUPS
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize(("rows", "per_head"), [(1, False), (2, False), (1, True), (2, True)])
def test_chunked_is_the_reference_under_every_mask(rows, per_head, kind, groups, dtype, tolerance):
    query, key, value = inputs(130, 150, groups, dtype)
    mask = random_mask(rows, 2 * groups if per_head else 1, 130, 150)
    mask = mask if kind == "bool" else additive(mask, dtype)
    expected = reference.attend_with_moments(query, key, value, mask, scale=SCALE)
    got = chunked.attend_with_moments(query, key, value, mask, scale=SCALE)
    assert_same(got, expected, tolerance)


@DTYPES
@pytest.mark.parametrize("kind", ["bool", "additive", "lowest"])
@pytest.mark.parametrize("hidden", ["ends", "middle", "later", "everything", "nothing"])
@pytest.mark.parametrize("rows", [1, 2])
def test_columns_hidden_from_all(monkeypatch, rows, hidden, kind, dtype, tolerance):
    """Whole runs of columns that no query of a block sees, between others that all of them do."""
    monkeypatch.setattr(chunked, "GAP", 3)
    query, key, value = inputs(40, 60, 2, dtype)
    mask = torch.ones(rows, 1, 40, 60, dtype=torch.bool)
    if hidden == "ends":
        mask[-1, ..., :7] = mask[0, ..., -9:] = False
    elif hidden == "middle":
        mask[-1, :, 3:, 20:22] = mask[-1, :, 5, 30:33] = False
    elif hidden == "later":
        mask = mask & causal(40, 60)
    elif hidden == "everything":
        mask[-1] = False
    given = mask if kind == "bool" else additive(mask, dtype)
    if kind == "lowest":
        given = given.clamp(min=torch.finfo(dtype).min)
    expected = reference.attend_with_moments(query, key, value, given, scale=SCALE)
    got = chunked.attend_with_moments(query, key, value, given, scale=SCALE)
    assert_same(got, expected, tolerance)


def test_an_additive_mask_may_favour_columns():
    query, key, value = inputs(40, 60, 2)
    mask = torch.zeros(1, 1, 40, 60, dtype=torch.float64)
    mask[..., 5:, 10:20], mask[..., 5, 30] = 2.5, -1.5
    got = chunked.attend_with_moments(query, key, value, mask, scale=SCALE)
    plain = chunked.attend_with_moments(query, key, value, mask * 0, scale=SCALE)
    assert_same(got, reference.attend_with_moments(query, key, value, mask, scale=SCALE), 1e-10)
    assert got[1][..., 10:20].gt(plain[1][..., 10:20]).all()


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_spans_hold_what_was_chosen(monkeypatch, gap):
    monkeypatch.setattr(chunked, "GAP", gap)
    chosen = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0], dtype=torch.bool)
    whole = {0: [1, 2, 4, 8], 1: [1, 2, 4, 8], 2: [1, 2, 3, 4, 8]}
    covered = [place for part in chunked.spans(chosen) for place in range(10)[part]]
    assert covered == whole[gap]
    assert chunked.spans(chosen[:1]) == chunked.spans(chosen[:0]) == []


@DTYPES
@GROUPS
@pytest.mark.parametrize("masked", [False, True])
def test_chunked_is_the_reference_with_softcap_sinks_and_counted(masked, groups, dtype, tolerance):
    query, key, value = inputs(130, 150, groups, dtype)
    counted = torch.ones(2, 130, dtype=torch.bool)
    counted[0, :70] = counted[1, 64] = False
    options = {
        "softcap": 1.5,
        "sinks": torch.linspace(-2, 2, 2 * groups).to(dtype),
        "counted": counted,
        "scale": SCALE,
    }
    mask = random_mask(2, 1, 130, 150) if masked else None
    expected = reference.attend_with_moments(query, key, value, mask, **options)
    got = chunked.attend_with_moments(query, key, value, mask, **options)
    assert_same(got, expected, tolerance)


@KERNELS
@GROUPS
def test_half_precision_sums_are_held_in_float32(kernel, groups):
    query, key, value = inputs(150, 150, groups, torch.bfloat16)
    wide = [x.double() for x in (query, key, value)]
    expected = reference.attend_with_column_sums(*wide, None, scale=SCALE)
    out, sums = kernel.attend_with_column_sums(query, key, value, None, scale=SCALE)
    assert (out.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(sums.double(), expected[1], rtol=0.02, atol=0.02)


@KERNELS
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (65, 65), (65, 130), (200, 200)])
def test_sums_add_up_to_the_queries(kernel, queries, stored):
    query, key, value = inputs(queries, stored)
    counted = torch.arange(queries).expand(2, -1) % 3 == 0
    for voters in (None, counted):
        _, sums = kernel.attend_with_column_sums(
            query, key, value, None, scale=SCALE, counted=voters
        )
        total = queries if voters is None else int(counted[0].sum())
        expected = torch.full((2, 2), float(total), dtype=torch.float64)
        torch.testing.assert_close(sums.sum(-1), expected, rtol=0, atol=1e-10)


@KERNELS
def test_inputs_are_left_as_they_were(kernel):
    tensors = inputs(70, 80)
    mask = additive(random_mask(2, 1, 70, 80), torch.float64)
    before = [x.clone() for x in (*tensors, mask)]
    kernel.attend_with_column_sums(*tensors, mask, scale=SCALE, softcap=1.0)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), before, strict=True))


# Log-sum-exps add up, their squares do not: flash has none.
@pytest.mark.parametrize(
    ("path", "squares"),
    [("triton", False), ("triton", True), ("flash", False), ("torch", False), ("torch", True)],
)
@pytest.mark.parametrize("queries", [40, 12])
@pytest.mark.usefixtures("interpreted")
def test_every_path_to_column_sums_gives_the_same(queries, path, squares, monkeypatch):
    """Torch's GPU kernel with a stand-in, Triton interpreted."""
    monkeypatch.setattr(columns, "columns_path", lambda *_, **__: path)
    monkeypatch.setattr(swapped, "flash", flash_stand_in)
    dtype = torch.float32 if path == "torch" else torch.float16
    noise = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, queries, 16, generator=noise).to(dtype)
    key, value = torch.randn(2, 2, 2, 40, 16, generator=noise).to(dtype)
    counted = torch.arange(queries).expand(2, -1) > torch.tensor([[3], [0]])
    got = columns.attend_with_moments(
        query, key, value, None, scale=0.25, counted=counted, squares=squares
    )
    expected = reference.attend_with_moments(
        query.double(), key.double(), value.double(), None, scale=0.25, counted=counted
    )
    assert (got[2] is None) != squares
    for one, other in zip(got[: 2 + squares], expected, strict=False):
        torch.testing.assert_close(one.double(), other, rtol=3e-3, atol=3e-3)
