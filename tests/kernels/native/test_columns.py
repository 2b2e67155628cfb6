# SPDX-License-Identifier: Apache-2.0
"""Causal attention in C++ and what entries receive of it, against naive attention in float64."""

import pytest
import torch

from kvfold.kernels import column_maxima, column_sums, dispatch, reference
from kvfold.kernels.native import columns
from kvfold.kernels.native.library import library, operations_so_far
from tests.helpers.kernel_inputs import additive, causal, random_mask

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

SCALE = 0.2
# Rows, KV heads, query heads of each, queries, entries, channels of keys, channels of values.
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 2, 40, 100, 64, 64),
        (1, 1, 7, 33, 33, 80, 48),  # a group that is no multiple of a block's rows
        (2, 3, 1, 100, 301, 24, 16),
        (1, 2, 60, 17, 70, 16, 144),  # a group that is more than a block
        (1, 1, 4, 300, 300, 8, 32),
        (1, 2, 3, 150, 900, 16, 16),  # tiles of entries that are not scored
        (1, 1, 2, 1, 5, 16, 16),
        (1, 1, 1, 1, 1, 16, 16),
    ],
    ids=str,
)


def drawn(shape, loud=0.0):
    """Queries, keys and values; the first entries of later queries are far above the others."""
    rows, heads, groups, queries, stored, size, value_size = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def noise(*sizes):
        return torch.randn(sizes, generator=generator)

    query, key = noise(rows, queries, heads * groups, size), noise(rows, heads, stored, size)
    value = noise(rows, heads, stored + 9, value_size)[:, :, :stored]  # with room behind
    key[:, :, : stored // 7] *= 1 + loud
    return query.transpose(1, 2) * 2, key, value


def chosen(shape, share):
    generator = torch.Generator().manual_seed(shape[4])
    return torch.rand(shape[0], shape[4], generator=generator) < share


def voting(shape):
    counted = torch.ones(shape[0], shape[3], dtype=torch.bool)
    counted[:, ::3] = counted[-1, -1] = False
    return counted


def assert_near(got, expected, tolerance=2e-5):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@SHAPES
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_sums_are_the_reference(shape, squares, counted):
    query, key, value = drawn(shape)
    voters = voting(shape) if counted else None
    *got, of_squares = columns.column_moments(
        query, key, value, None, scale=SCALE, counted=voters, squares=squares
    )
    wide = [x.double() for x in (query, key, value)]
    out, sums, expected = reference.attend_with_moments(*wide, None, scale=SCALE, counted=voters)
    assert_near(got, [out, sums])
    assert (of_squares is None) != squares
    if of_squares is not None:
        assert_near([of_squares], [expected])


@SHAPES
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("loud", [0.0, 9.0, 60.0])
def test_maxima_are_the_reference(shape, rms, weighted, share, loud):
    """`loud`: entries that are not scored are far above those that are, or that hide them."""
    query, key, value = drawn(shape, loud)
    scored, voters = chosen(shape, share), voting(shape)
    if loud and share < 1:
        scored[:, : shape[4] // 7] = False
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(shape[0], shape[3], generator=generator)
    heads = torch.rand(shape[0], shape[1] * shape[2], shape[4], generator=generator)
    weights = {"row_weights": rows, "column_weights": heads} if weighted else {}
    options = {"scale": SCALE, "scored": scored, "counted": voters, "rms": rms}
    assert dispatch.columns_in_cpp(query, key, value, None, scale=SCALE) == (
        shape[3] >= dispatch.FEW
    )
    none = dict.fromkeys(("row_weights", "column_weights"))
    out, most = columns.column_maxima(query, key, value, None, **options, **none | weights)
    if rms:
        most = column_maxima._root_of_mean(most, query, voters)
    wide = [x.double() for x in (query, key, value)]
    doubled = {name: of_name.double() for name, of_name in weights.items()}
    expected = reference.attend_with_column_maxima(*wide, None, **options, **doubled)
    # Logits of hundreds differ by their rounding, which weights repeat.
    assert_near([out, most], expected, 2e-5 * (1 + loud))


@SHAPES
@pytest.mark.parametrize("given_once", [False, True])
def test_padding_is_seen_by_no_query_and_sees_nothing(shape, given_once):
    """Padding before a text and before what repeats it; its own queries may see any others."""
    query, key, value = drawn(shape)
    rows, queries, stored = shape[0], shape[3], shape[4]
    shown = torch.ones(1 if given_once else rows, stored, dtype=torch.bool)
    shown[0, : stored // 9] = shown[-1, : stored // 3] = False
    shown[-1, stored - queries : stored - queries // 2] = False
    shown[:, -1] = True
    mask = (causal(queries, stored) & shown[:, None])[:, None]
    own = shown[:, stored - queries :]
    mask[:, 0][~own] = random_mask(1, 1, len(mask) * queries, stored)[0, 0][~own.flatten()]
    mask[:, 0].diagonal(stored - queries, 1, 2)[~own] = False
    scored, voters = chosen(shape, 0.6) & shown, own.expand(rows, -1)
    wide = [x.double() for x in (query, key, value)]
    assert columns.is_causal(mask)
    out, sums, squares = columns.column_moments(
        query, key, value, mask, scale=SCALE, counted=None, squares=True
    )
    told, *expected = reference.attend_with_moments(*wide, mask, scale=SCALE, counted=voters)
    assert_near([sums, squares], expected)
    options = {"scale": SCALE, "scored": scored, "counted": voters, "rms": False}
    none = dict.fromkeys(("row_weights", "column_weights"))
    again, most = columns.column_maxima(query, key, value, mask, **options, **none)
    assert_near([most], reference.attend_with_column_maxima(*wide, mask, **options)[1:])
    for each in (out, again):
        hidden = ~voters[:, None, :, None]
        assert each.masked_select(hidden).eq(0).all()
        assert_near([each.masked_fill(hidden, 0)], [told.masked_fill(hidden, 0)])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_padding_may_lie_anywhere(share):
    """Also last in a block of queries, of which the earlier ones are real."""
    shape = (2, 2, 3, 200, 700, 16, 32)
    queries, stored = shape[3:5]
    query, key, value = drawn(shape)
    shown = chosen(shape, 0.5)
    shown[:, -1] = True
    mask = (causal(queries, stored) & shown[:, None])[:, None]
    voters = shown[:, stored - queries :]
    scored = torch.rand(shown.shape, generator=torch.Generator().manual_seed(1)) < share
    scored &= shown
    options = {"scale": SCALE, "counted": voters}
    none = dict.fromkeys(("row_weights", "column_weights"))
    wide = [x.double() for x in (query, key, value)]
    assert columns.is_causal(mask)
    got = columns.column_maxima(
        query, key, value, mask, scored=scored, rms=False, **options, **none
    )
    expected = reference.attend_with_column_maxima(*wide, mask, scored=scored, **options)
    hidden = ~voters[:, None, :, None]
    assert_near(got, [expected[0].masked_fill(hidden, 0), expected[1]])
    sums = columns.column_moments(query, key, value, mask, squares=True, **options)[1:]
    assert_near(sums, reference.attend_with_moments(*wide, mask, **options)[1:])


def test_scored_entries_whose_weights_are_all_lost_are_told_apart():
    """Beside an entry 90 above them float32's weights of all others are 0."""
    key = torch.zeros(1, 1, 40, 16)
    key[0, 0, :, 0] = torch.arange(40) / 40
    key[0, 0, 0, 0] = 90.0
    query = torch.zeros(1, 1, 20, 16)
    query[..., 0] = 1.0
    value = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    scored = torch.arange(40)[None] > 5
    options = {"scale": 1.0, "scored": scored, "counted": None, "rms": False}
    none = dict.fromkeys(("row_weights", "column_weights"))
    _, most = columns.column_maxima(query, key, value, None, **options, **none)
    wide = [x.double() for x in (query, key, value)]
    _, expected = reference.attend_with_column_maxima(*wide, None, **options)
    assert expected[0, 0, 6:].min() > 1e-3
    torch.testing.assert_close(most.double(), expected, rtol=1e-5, atol=0)


def test_sums_of_thousands_of_queries_stay_within_a_millionth():
    shape = 1, 1, 1, 3000, 3000, 16, 16
    query, key, value = drawn(shape)
    _, sums, _ = columns.column_moments(
        query, key, value, None, scale=SCALE, counted=None, squares=False
    )
    wide = [x.double() for x in (query, key, value)]
    _, expected, _ = reference.attend_with_moments(*wide, None, scale=SCALE)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-6)


def test_no_number_depends_on_the_number_of_threads():
    query, key, value = drawn((2, 2, 3, 200, 260, 32, 32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(
                columns.column_moments(
                    query, key, value, None, scale=SCALE, counted=None, squares=True
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_what_is_not_a_number_is_not_hidden_and_gives_others_nothing():
    query, key, value = drawn((1, 1, 2, 20, 30, 16, 16))
    options = {"scale": SCALE, "counted": None, "squares": False}
    key[0, 0, 27, 2] = torch.nan
    out, sums, _ = columns.column_moments(query, key, value, None, **options)
    assert out[:, :, 17:].isnan().all()
    rest = [x[:, :, :17] if x is query else x[:, :, :27] for x in (query, key, value)]
    _, expected, _ = columns.column_moments(*rest, None, **options)
    torch.testing.assert_close(sums[..., :27], expected)


@pytest.mark.parametrize("of", ["query", "key", "infinite key"])
@pytest.mark.parametrize("rms", [False, True])
def test_rows_that_are_not_numbers_give_entries_nothing(of, rms):
    """As in the reference, whose weights of such rows are 0."""
    query, key, value = drawn((1, 2, 2, 40, 60, 16, 16))
    if of == "query":
        query[0, 1, 30, 3] = torch.nan
    else:
        key[0, 0, 45, 3] = torch.nan if of == "key" else torch.inf
    scored = torch.arange(60)[None] % 3 > 0
    options = {"scale": SCALE, "counted": None}
    none = dict.fromkeys(("row_weights", "column_weights"))
    _, *got = columns.column_moments(query, key, value, None, squares=True, **options)
    _, most = columns.column_maxima(
        query, key, value, None, scored=scored, rms=rms, **options, **none
    )
    most = column_maxima._root_of_mean(most, query, None) if rms else most
    wide = [x.double() for x in (query, key, value)]
    _, *expected = reference.attend_with_moments(*wide, None, **options)
    _, of_maxima = reference.attend_with_column_maxima(
        *wide, None, scored=scored, rms=rms, **options
    )
    assert_near([*got, most], [*expected, of_maxima])


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_a_tile_whose_logits_are_all_lost_leaves_the_others(share):
    """An entry of −∞, alone among the scored or first of all, has no weight."""
    query, key, value = drawn((1, 1, 2, 40, 700, 16, 16))
    query[..., 0] = 1e20
    key[..., 0] = 0
    key[:, :, :300, 0] = -torch.inf
    scored = torch.arange(700)[None] < 700 * share
    options = {"scale": SCALE, "scored": scored, "counted": None, "rms": False}
    none = dict.fromkeys(("row_weights", "column_weights"))
    got = columns.column_maxima(query, key, value, None, **options, **none)
    wide = [x.double() for x in (query, key, value)]
    expected = reference.attend_with_column_maxima(*wide, None, **options)
    assert_near(got, [expected[0], expected[1].nan_to_num(0.0)])


@pytest.mark.parametrize("text", [12, 1, 16], ids=["packed", "alone", "chunks"])
def test_texts_that_do_not_see_each_other_are_not_taken_for_padding(text):
    """The last query hides the earlier texts, whose own queries see them."""
    query, key, value = drawn((1, 2, 2, 32, 32, 16, 16))
    of_text = torch.arange(32) // text
    mask = (causal(32, 32) & (of_text == of_text[:, None]))[None, None]
    assert not dispatch.columns_in_cpp(query, key, value, mask, scale=SCALE)
    found = column_sums.attend_with_moments(query, key, value, mask, scale=SCALE)[:2]
    wide = [x.double() for x in (query, key, value)]
    assert_near(found, reference.attend_with_moments(*wide, mask, scale=SCALE)[:2])


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 4)])
def test_a_mask_that_hides_an_earlier_entry_is_not_overlooked(rows, heads):
    query, key, value = drawn((2, 2, 2, 20, 50, 16, 16))
    mask = causal(20, 50).expand(rows, heads, 20, 50).clone()
    assert columns.is_causal(mask)
    assert columns.is_causal(mask[:1, :1].expand(2, 4, 20, 50))
    assert columns.is_causal(mask.transpose(2, 3).contiguous().transpose(2, 3))
    assert dispatch.columns_in_cpp(query, key, value, mask, scale=SCALE)
    for place in ((0, 0, 19, 0), (-1, -1, 0, 30), (0, 0, 0, 31), (-1, 0, 7, 49)):
        other = mask.clone()
        other[place] ^= True
        assert not columns.is_causal(other)
        expected = reference.attend_with_moments(
            query.double(), key.double(), value.double(), other, scale=SCALE
        )
        got = column_sums.attend_with_moments(query, key, value, other, scale=SCALE, squares=True)
        assert_near(got, expected)


def test_what_cpp_does_not_take_is_done_by_torch():
    query, key, value = drawn((1, 2, 2, 20, 50, 16, 16))
    takes = dispatch.columns_in_cpp
    assert takes(query, key, value, None, scale=SCALE)
    assert not takes(query, key, value, None, scale=SCALE, softcap=2.0)
    assert not takes(query, key, value, None, scale=SCALE, sink_logits=torch.zeros(4))
    assert not takes(query, key, value[..., :7], None, scale=SCALE)
    assert not takes(query[:, :, :9], key, value, None, scale=SCALE)
    assert not takes(query, key[:, :, :19], value[:, :, :19], None, scale=SCALE)
    assert not takes(query.double(), key.double(), value.double(), None, scale=SCALE)
    assert not takes(
        query, key, value, additive(causal(20, 50)[None, None], torch.float32), scale=1
    )
    assert not takes(query, key, value, random_mask(1, 1, 20, 50), scale=SCALE)
    assert not takes(query.requires_grad_(), key, value, None, scale=SCALE)


def test_operations_are_those_of_fused_attention():
    """Products that causality masks are counted, as torch counts them."""
    query, key, value = drawn((2, 2, 3, 20, 50, 16, 32))
    before = operations_so_far()
    columns.column_moments(query, key, value, None, scale=SCALE, counted=None, squares=False)
    assert operations_so_far() - before == 2 * 2 * 6 * 20 * 50 * (16 + 32)


def test_what_is_the_same_for_all_rows_may_be_given_once():
    shape = 2, 1, 2, 20, 50, 16, 16
    query, key, value = drawn(shape)
    scored, voters = chosen(shape, 0.4)[:1], voting(shape)[:1].int()
    options = {"scale": SCALE, "rms": False, "row_weights": None, "column_weights": None}
    got = columns.column_maxima(query, key, value, None, scored=scored, counted=voters, **options)
    wide = [x.double() for x in (query, key, value)]
    expected = reference.attend_with_column_maxima(
        *wide, None, scored=scored.expand(2, -1), counted=voters.bool().expand(2, -1), scale=SCALE
    )
    assert_near(got, expected)
