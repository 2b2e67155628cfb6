# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks of queries, against the reference."""

import pytest
import torch

from kvfold.kernels import query_blocks as chunked
from kvfold.kernels import reference
from tests.helpers.kernel_inputs import DTYPES, additive, assert_same, causal, inputs, random_mask

GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
SCALE = 0.3


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
        "sink_logits": torch.linspace(-2, 2, 2 * groups).to(dtype),
        "counted": counted,
        "scale": SCALE,
    }
    mask = random_mask(2, 1, 130, 150) if masked else None
    expected = reference.attend_with_moments(query, key, value, mask, **options)
    got = chunked.attend_with_moments(query, key, value, mask, **options)
    assert_same(got, expected, tolerance)
