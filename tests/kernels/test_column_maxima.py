# SPDX-License-Identifier: Apache-2.0
"""Column maxima: the reference against a naive loop, the fast path against the reference."""

import math

import pytest
import torch

from kvfold.kernels import column_maxima as maxima
from kvfold.kernels import query_blocks as chunked
from kvfold.kernels import reference
from tests.helpers.kernel_inputs import DTYPES, additive, assert_same, causal, inputs, random_mask
from tests.kernels.test_column_sums import SCALE

KERNELS = pytest.mark.parametrize("kernel", [reference, maxima], ids=["reference", "chunked"])
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])


def naive(query, key, mask, scored, softcap=None, counted=None, rows=None, columns=None):
    """The maxima alone: one query head, one query, one key at a time, in python floats."""
    batch, query_heads, queries, _ = query.shape
    heads, stored = key.shape[1:3]
    groups = query_heads // heads
    most = torch.zeros(batch, heads, stored, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            for i in range(queries):
                logits = {}
                for j in range(stored):
                    if mask[b, h, i, j] and scored[b, j]:
                        logit = float(query[b, h, i] @ key[b, h // groups, j]) * SCALE
                        logits[j] = softcap * math.tanh(logit / softcap) if softcap else logit
                if counted is not None and not counted[b, i]:
                    continue
                total = sum(math.exp(logit) for logit in logits.values())
                for j, logit in logits.items():
                    weight = math.exp(logit) / total
                    weight *= float(rows[b, i]) if rows is not None else 1
                    weight *= float(columns[b, h, j]) if columns is not None else 1
                    here = most[b, h // groups, j]
                    most[b, h // groups, j] = max(float(here), weight)
    return most


def prefix_chunk_and_new(stored, queries, rows=2):
    """What is scored while a chunk is repeated: a prefix, a run of the rest, the new entries."""
    scored = torch.zeros(rows, stored, dtype=torch.bool)
    old = stored - queries
    scored[:, :2] = scored[:, old // 3 : 2 * old // 3] = scored[:, old:] = True
    return scored


def scattered(stored, rows=2):
    generator = torch.Generator().manual_seed(stored)
    return torch.rand(rows, stored, generator=generator) < 0.4


def lowest(mask, dtype):
    """An additive mask as models make them: finite, so that no row is all −∞."""
    return additive(mask, dtype).clamp(min=torch.finfo(dtype).min)


def masks(mask, dtype=torch.float64):
    return mask, additive(mask, dtype), lowest(mask, dtype)


def both(query, key, value, mask, **options):
    """Output and maxima of the fast path and of the reference."""
    call = (query, key, value, mask)
    return (
        maxima.attend_with_column_maxima(*call, scale=SCALE, **options),
        reference.attend_with_column_maxima(*call, scale=SCALE, **options),
    )


# --- the truth ---------------------------------------------------------------------------------


@KERNELS
def test_golden(kernel):
    """Rows [.5 .5 0] and [.2 .5 .3]; of entries 0 and 2 alone, [1 0] and [.4 .6]."""
    rows = torch.tensor([[0.5, 0.5, 0], [0.2, 0.5, 0.3]], dtype=torch.float64)
    key = torch.eye(3, dtype=torch.float64)[None, None]
    query = rows.log().clamp(min=-9)[None, None]
    scored = torch.tensor([[True, False, True]])
    out, most = kernel.attend_with_column_maxima(query, key, key, None, scale=1.0, scored=scored)
    # With one-hot values the output is the attention itself.
    torch.testing.assert_close(out[0, 0], rows, rtol=0, atol=1e-12)
    assert most.flatten().tolist() == pytest.approx([1, 0, 0.6], abs=1e-12)
    last = torch.tensor([[False, True]])
    _, most = kernel.attend_with_column_maxima(
        query, key, key, None, scale=1.0, scored=scored, counted=last
    )
    assert most.flatten().tolist() == pytest.approx([0.4, 0, 0.6], abs=1e-12)


@KERNELS
@GROUPS
def test_every_option_at_once_is_the_naive_loop(kernel, groups):
    query, key, value = inputs(6, 9, groups)
    mask, scored = random_mask(2, 2 * groups, 6, 9), scattered(9)
    counted = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], dtype=torch.bool)
    expected = naive(query, key, mask, scored, softcap=1.2, counted=counted)
    for given in masks(mask):
        _, got = kernel.attend_with_column_maxima(
            query, key, value, given, scale=SCALE, softcap=1.2,
            sink_logits=torch.linspace(-1, 2, 2 * groups), scored=scored, counted=counted,
        )  # fmt: skip
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@KERNELS
@pytest.mark.parametrize(
    "option", ["softcap", "sink_logits", "counted", "mask", "everything scored"]
)
def test_each_option_alone_is_the_naive_loop(kernel, option):
    query, key, value = inputs(6, 9, groups=2)
    mask = random_mask(2, 4, 6, 9) if option == "mask" else causal(6, 9).expand(2, 4, 6, 9)
    scored = torch.ones(2, 9).bool() if option == "everything scored" else scattered(9)
    counted = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
    options = {"softcap": {"softcap": 0.8}, "counted": {"counted": counted}}.get(option, {})
    expected = naive(query, key, mask, scored, **options)
    if option == "sink_logits":
        options["sink_logits"] = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)
    given = mask if option == "mask" else None
    _, got = kernel.attend_with_column_maxima(
        query, key, value, given, scale=SCALE, scored=scored, **options
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@KERNELS
@pytest.mark.parametrize("masked", [False, True])
def test_the_output_is_that_of_all_that_is_stored(kernel, masked):
    query, key, value = inputs(130, 150)
    mask = random_mask(2, 4, 130, 150) if masked else None
    options = {"scale": SCALE, "softcap": 1.5, "sink_logits": torch.linspace(-2, 2, 4).double()}
    expected, _ = reference.attend_with_column_sums(query, key, value, mask, **options)
    out, _ = kernel.attend_with_column_maxima(
        query, key, value, mask, scored=scattered(150), **options
    )
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@KERNELS
def test_a_lone_scored_entry_receives_everything(kernel):
    query, key, value = inputs(20, 30)
    scored = torch.arange(30).expand(2, -1) == torch.tensor([[4], [29]])
    _, most = kernel.attend_with_column_maxima(query, key, value, None, scale=SCALE, scored=scored)
    torch.testing.assert_close(most, scored[:, None].expand(2, 2, 30).double())


# --- weights of rows and columns ---------------------------------------------------------------


def weights_of(query, key):
    """Weights of queries `[B, S]` and of entries by query head `[B, Hq, T]`, some of them 0."""
    generator = torch.Generator().manual_seed(5)
    shapes = (query.shape[0], query.shape[2]), (*query.shape[:2], key.shape[2])
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [3 * weights.clamp(min=0) for weights in drawn]


@KERNELS
def test_golden_weights(kernel):
    """KVzip+: ‖W_o v‖ and 1/‖h‖ of one head, rows of two queries over six entries."""
    one, two, three = (torch.arange(n, dtype=torch.float64) for n in (8, 4, 3))
    i, j = one[:, None], two[None]
    key = ((7 * i + 3 * j + i * j) % 11 - 5) / 4
    value = ((5 * i + 2 * j + 4 * i * j) % 7 - 3) / 2
    query = ((4 * i + 5 * j + 2 * i * j) % 9 - 4) / 4
    output = ((3 * two[:, None] + 2 * three + two[:, None] * three) % 5 - 2) / 2
    key, value = key[None, None, :6], value[None, None, :6]
    hidden = torch.tensor([[1.118034, 0.707107]], dtype=torch.float64)
    options = {"scale": 0.5, "scored": torch.ones(1, 6).bool()}
    call = query[None, None, 6:], key, value, torch.ones(1, 1, 2, 6).bool()
    _, plain = kernel.attend_with_column_maxima(*call, **options)
    expected = [0.264562, 0.176236, 0.165559, 0.232681, 0.170233, 0.175637]
    assert plain.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    columns = (value @ output).norm(dim=-1)
    _, plus = kernel.attend_with_column_maxima(
        *call, row_weights=1 / hidden, column_weights=columns, **options
    )
    expected = [1.045772, 0.440590, 0.685120, 0.838945, 0.429086, 0.858516]
    assert plus.flatten().tolist() == pytest.approx(expected, abs=2e-6)


@KERNELS
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("given", ["rows", "columns", "both"])
def test_weights_multiply_each_query_head_before_the_maximum(kernel, given, groups):
    query, key, value = inputs(6, 9, groups)
    mask, scored = random_mask(2, 2 * groups, 6, 9), scattered(9)
    rows, columns = weights_of(query, key)
    rows = None if given == "columns" else rows
    columns = None if given == "rows" else columns
    expected = naive(query, key, mask, scored, rows=rows, columns=columns)
    _, got = kernel.attend_with_column_maxima(
        query, key, value, mask, scale=SCALE, scored=scored, row_weights=rows,
        column_weights=columns,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_weighted_blocks_are_the_reference(masked, groups, dtype, tolerance):
    """Float32 without a mask: the flash path, when few entries are scored."""
    query, key, value = inputs(140, 700, groups, dtype)
    rows, columns = weights_of(query, key)
    mask = random_mask(2, 1, 140, 700) if masked else None
    scored = torch.arange(700).expand(2, -1) % 7 == 3
    options = {"row_weights": rows.to(dtype), "column_weights": columns.to(dtype)}
    assert_same(*both(query, key, value, mask, scored=scored, **options), tolerance)


# --- rows and columns that add nothing ---------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("kind", range(3), ids=["bool", "additive", "lowest"])
def test_queries_that_may_attend_to_no_scored_entry_add_nothing(kernel, kind):
    """Row 0: its first queries see nothing at all; row 1: all but its last see none scored."""
    query, key, value = inputs(20, 30, groups=2)
    mask = causal(20, 30).expand(2, 1, 20, 30).clone()
    mask[0, :, :5] = False
    scored = torch.arange(30).expand(2, -1) >= torch.tensor([[0], [29]])
    expected = naive(query, key, mask.expand(2, 4, 20, 30), scored)
    _, most = kernel.attend_with_column_maxima(
        query, key, value, masks(mask)[kind], scale=SCALE, scored=scored
    )
    torch.testing.assert_close(most, expected, rtol=1e-10, atol=1e-10)
    # One logit each: were hidden entries in the softmax, these would not be 1.
    assert most[1, :, 29].eq(1).all() and most[1, :, :29].eq(0).all()


@KERNELS
@pytest.mark.parametrize("kind", range(3), ids=["bool", "additive", "lowest"])
@pytest.mark.parametrize("why", ["nothing scored", "nobody counted", "everything hidden"])
def test_all_zero_where_nothing_is_to_be_said(kernel, why, kind):
    query, key, value = inputs(20, 30)
    mask = causal(20, 30).expand(2, 1, 20, 30).clone()
    scored, counted = torch.ones(2, 30).bool(), torch.ones(2, 20).bool()
    {"nothing scored": scored, "nobody counted": counted, "everything hidden": mask}[why][0] = False
    _, most = kernel.attend_with_column_maxima(
        query, key, value, masks(mask)[kind], scale=SCALE, scored=scored, counted=counted
    )
    assert most[0].eq(0).all()
    assert most[1].gt(0).all()


# --- weights that underflow --------------------------------------------------------------------


@pytest.mark.cases(24)
@KERNELS
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "lowest"])
@pytest.mark.parametrize(
    ("dtype", "gap"),
    [(torch.float32, gap) for gap in (30, 43, 45, 80, 92, 94, 200)]
    + [(torch.float64, gap) for gap in (200, 360, 740, 2000)],
)
def test_scored_entries_outweighed_by_far(kernel, dtype, gap, kind):
    """An entry that is not scored leaves the others e^−gap of the attention, or nothing."""
    query, key, value = inputs(150, 170, groups=4, dtype=dtype)
    query, key = query.clone(), key.clone()
    query[..., 0], key[..., 0], key[:, :, 3, 0] = 1.0, 0.0, gap / SCALE
    scored = prefix_chunk_and_new(170, 150)
    assert not scored[:, 3].any()
    mask = causal(150, 170)[None, None]
    given = dict(zip(("bool", "additive", "lowest"), masks(mask, dtype), strict=True)).get(kind)
    without = mask & (torch.arange(170) != 3)
    options = {"scale": SCALE, "scored": scored}
    wide = [x.double() for x in (query, key, value)]
    _, expected = reference.attend_with_column_maxima(*wide, without, **options)
    out, got = kernel.attend_with_column_maxima(query, key, value, given, **options)
    torch.testing.assert_close(got, expected.to(dtype), rtol=5e-6, atol=0)
    # All of the attention is elsewhere.
    torch.testing.assert_close(out, value.repeat_interleave(4, 1)[:, :, 3:4].expand_as(out))


@KERNELS
def test_sinks_that_take_everything_change_no_maximum(kernel):
    query, key, value = inputs(150, 170, groups=4, dtype=torch.float32)
    options = {"scale": SCALE, "scored": prefix_chunk_and_new(170, 150)}
    _, expected = reference.attend_with_column_maxima(query, key, value, None, **options)
    out, got = kernel.attend_with_column_maxima(
        query, key, value, None, sink_logits=torch.full((8,), 300.0), **options
    )
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-9)
    assert out.eq(0).all()


@KERNELS
def test_rows_that_do_not_count_may_underflow(kernel):
    query, key, value = inputs(150, 170, groups=4, dtype=torch.float32)
    query, key = query.clone(), key.clone()
    query[..., 0], key[..., 0], key[:, :, 3, 0] = 0.0, 0.0, 1.0
    query[:, :, ::2, 0] = 200 / SCALE
    options = {"scale": SCALE, "scored": prefix_chunk_and_new(170, 150)}
    counted = torch.arange(150).expand(2, -1) % 2 == 1
    without = causal(150, 170)[None, None] & (torch.arange(170) != 3)
    _, expected = reference.attend_with_column_maxima(
        query, key, value, without, counted=counted, **options
    )
    _, got = kernel.attend_with_column_maxima(query, key, value, None, counted=counted, **options)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-9)


# --- roots of mean squares -----------------------------------------------------------------------


def mean_squares(query, key, mask, scored, counted, rows, columns):
    """Roots of mean squares by the naive maxima: one query and query head at a time."""
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    sums = torch.zeros(len(key), heads, key.shape[2], dtype=torch.float64)
    for i in range(query.shape[2]):
        for group in range(groups):
            one = query[:, group::groups, i : i + 1]
            own = None if columns is None else columns[:, group::groups]
            weights = None if rows is None else rows[:, i : i + 1]
            count = None if counted is None else counted[:, i : i + 1]
            seen = mask[:, group::groups, i : i + 1]
            sums += naive(one, key, seen, scored, None, count, weights, own) ** 2
    queries = torch.full((len(key),), query.shape[2]) if counted is None else counted.sum(-1)
    return (sums / (groups * queries).view(-1, 1, 1)).sqrt()


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_roots_of_mean_squares_are_the_naive_ones(kernel, some, weighted):
    query, key, value = inputs(12, 40, groups=2)
    scored, mask = prefix_chunk_and_new(40, 12), causal(12, 40).expand(2, 4, -1, -1)
    counted = torch.arange(12).expand(2, -1) % 3 > 0 if some else None
    generator = torch.Generator().manual_seed(3)
    rows = torch.rand(2, 12, generator=generator).double() if weighted else None
    columns = torch.rand(2, 4, 40, generator=generator).double() if weighted else None
    expected = mean_squares(query, key, mask, scored, counted, rows, columns)
    for given in (None, mask):
        _, got = kernel.attend_with_column_maxima(
            query,
            key,
            value,
            given,
            scale=SCALE,
            scored=scored,
            counted=counted,
            row_weights=rows,
            column_weights=columns,
            rms=True,
        )
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-9)


def test_roots_of_mean_squares_in_two_passes_are_those_of_one():
    query, key, value = inputs(150, 400, groups=4, dtype=torch.float32)
    query, key, value = (torch.cat([x, x[..., :2]], -1)[..., :6] for x in (query, key, value))
    scored = torch.arange(400).expand(2, -1) >= 250
    scored = scored | (torch.arange(400) < 20)
    options = {"scale": SCALE, "scored": scored, "rms": True}
    _, expected = reference.attend_with_column_maxima(query, key, value, None, **options)
    _, got = maxima.attend_with_column_maxima(query, key, value, None, **options)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-7)


def test_golden_roots_of_mean_squares():
    def base(a, b, c, modulus, minus, over):
        i, j = torch.arange(8)[:, None], torch.arange(4)
        return (((a * i + b * j + c * i * j) % modulus) - minus)[None, None].double() / over

    query, key = base(4, 5, 2, 9, 4, 4), base(7, 3, 1, 11, 5, 4)
    everything = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    _, got = maxima.attend_with_column_maxima(
        query, key, key, everything, scale=0.5, scored=everything[0, 0, :1], rms=True
    )
    expected = [0.136458, 0.121252, 0.136786, 0.125746, 0.129136, 0.167189, 0.140199, 0.121100]
    torch.testing.assert_close(got[0, 0], torch.tensor(expected).double(), rtol=0, atol=1e-6)
    assert got[0, 0].topk(3).indices.tolist() == [5, 6, 2]


# --- chunked against the reference -------------------------------------------------------------


@DTYPES
@GROUPS
@pytest.mark.parametrize(
    ("queries", "stored"),
    [(1, 1), (1, 200), (127, 140), (128, 140), (129, 140), (200, 200), (257, 300)],
)
def test_chunked_is_the_reference(queries, stored, groups, dtype, tolerance):
    query, key, value = inputs(queries, stored, groups, dtype)
    for scored in (prefix_chunk_and_new(stored, queries), scattered(stored)):
        assert_same(*both(query, key, value, None, scored=scored), tolerance)


@DTYPES
@GROUPS
@pytest.mark.parametrize("kind", range(3), ids=["bool", "additive", "lowest"])
@pytest.mark.parametrize(("rows", "per_head"), [(1, False), (2, False), (1, True), (2, True)])
def test_chunked_is_the_reference_under_every_mask(rows, per_head, kind, groups, dtype, tolerance):
    query, key, value = inputs(130, 150, groups, dtype)
    mask = random_mask(rows, 2 * groups if per_head else 1, 130, 150)
    given = masks(mask, dtype)[kind]
    assert_same(*both(query, key, value, given, scored=scattered(150)), tolerance)


@DTYPES
@GROUPS
@pytest.mark.parametrize("masked", [False, True])
def test_chunked_is_the_reference_with_softcap_sinks_and_counted(masked, groups, dtype, tolerance):
    query, key, value = inputs(130, 150, groups, dtype)
    counted = torch.ones(2, 130, dtype=torch.bool)
    counted[0, :70] = counted[1, 64] = False
    options = {
        "softcap": 1.5,
        "sink_logits": torch.linspace(-2, 2, 2 * groups).to(dtype),
        "counted": counted,
        "scored": scattered(150),
    }
    mask = random_mask(2, 1, 130, 150) if masked else None
    assert_same(*both(query, key, value, mask, **options), tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gap", [1, 5, 20])
def test_slices_of_scored_entries_are_put_together(monkeypatch, gap, masked):
    """Many slices, different for each row, some behind what the first block sees."""
    monkeypatch.setattr(chunked, "GAP", gap)
    query, key, value = inputs(150, 170, groups=2)
    scored = torch.stack([prefix_chunk_and_new(170, 150)[0], scattered(170)[1]])
    scored[1, 40:60] = scored[1, 145:160] = False
    mask = (causal(150, 170) & (torch.arange(170) > 11))[None, None] if masked else None
    assert len(chunked.spans(scored[1])) > 1
    assert_same(*both(query, key, value, mask, scored=scored), 1e-10)


@pytest.mark.slow
@KERNELS
@GROUPS
def test_half_precision_maxima_are_held_in_float32(kernel, groups):
    query, key, value = inputs(150, 150, groups, torch.bfloat16)
    wide = [x.double() for x in (query, key, value)]
    options = {"scale": SCALE, "scored": scattered(150)}
    expected = reference.attend_with_column_maxima(*wide, None, **options)
    out, most = kernel.attend_with_column_maxima(query, key, value, None, **options)
    assert (out.dtype, most.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(most.double(), expected[1], rtol=0.02, atol=0.02)


@KERNELS
def test_inputs_are_left_as_they_were(kernel):
    tensors = *inputs(70, 80), additive(random_mask(2, 1, 70, 80), torch.float64), scattered(80)
    before = [x.clone() for x in tensors]
    *call, scored = tensors
    kernel.attend_with_column_maxima(*call, scale=SCALE, softcap=1.0, scored=scored)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
