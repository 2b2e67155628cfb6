# SPDX-License-Identifier: Apache-2.0
"""Budgets: what they are read from, what they come to in entries, and what is refused."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import Budget, BudgetError, KvfoldError

ONE = {"entry_bytes": 1, "layers": 1, "heads": 1, "rows": 1}


@pytest.mark.parametrize(
    ("value", "kind", "amount"),
    [
        (512, "tokens", 512),
        ("512", "tokens", 512),
        (" 512 ", "tokens", 512),
        (1, "tokens", 1),
        ("1", "tokens", 1),
        (0.2, "ratio", 0.2),
        ("0.2", "ratio", 0.2),
        (".2", "ratio", 0.2),
        ("20%", "ratio", 0.2),
        ("20 %", "ratio", 0.2),
        ("12.5%", "ratio", 0.125),
        (1.0, "ratio", 1.0),
        ("1.0", "ratio", 1.0),
        ("1.", "ratio", 1.0),
        ("100%", "ratio", 1.0),
        ("2GiB", "bytes", 2_147_483_648),
        ("2GB", "bytes", 2_000_000_000),
        ("1TB", "bytes", 10**12),
        ("1TiB", "bytes", 2**40),
        ("512 mib", "bytes", 536_870_912),
        ("1.5KiB", "bytes", 1536),
        ("3MB", "bytes", 3_000_000),
        ("7kb", "bytes", 7000),
        ("100B", "bytes", 100),
    ],
)
def test_a_plain_value_is_read(value, kind, amount):
    budget = Budget.of(value)
    assert budget.kind == kind
    assert budget.amount == pytest.approx(amount, rel=1e-12)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(512), Budget.tokens(512)),
        (np.int32(512), Budget.tokens(512)),
        (np.array(512), Budget.tokens(512)),
        (torch.tensor(512), Budget.tokens(512)),
        (np.float64(0.7), Budget.ratio(0.7)),
        (np.float32(0.7), Budget.ratio(0.7)),
        (torch.tensor(0.7), Budget.ratio(0.7)),
        (Fraction(1, 3), Budget.ratio(1 / 3)),
    ],
)
def test_a_number_of_numpy_or_torch_is_a_plain_one(value, expected):
    budget = Budget.of(value)
    assert budget == expected and type(budget.amount) is type(expected.amount)
    assert getattr(Budget, budget.kind)(value) == expected


def test_a_size_in_bytes_may_be_of_numpy():
    assert Budget.bytes(np.int64(4000)) == Budget.bytes(torch.tensor(4000)) == Budget.bytes(4000)


def test_a_single_precision_ratio_keeps_as_many_as_the_decimal_it_was_written_as():
    assert Budget.of(np.float32(0.7)).per_layer(1000, **ONE) == 700


@pytest.mark.parametrize(
    "value",
    [True, np.True_, torch.tensor(True), np.array([512]), torch.tensor([512]), 1j, None, [512]],
)
def test_what_is_no_number_is_refused(value):
    for make in (Budget.of, Budget.tokens, Budget.ratio, Budget.bytes):
        with pytest.raises(BudgetError, match="an int, a float or a text"):
            make(value)


def test_of_agrees_with_the_named_constructors():
    assert Budget.of(512) == Budget.tokens(512)
    assert Budget.of(0.2) == Budget.ratio(0.2)
    assert Budget.of("2GiB") == Budget.bytes("2GiB") == Budget.bytes(2 * 1024**3)
    assert Budget.bytes("512") == Budget.bytes(512) != Budget.of("512")


def test_percent_are_the_ratio_that_they_say():
    assert [Budget.of(text).amount for text in ("33.3%", "0.7%", "14.2%")] == [0.333, 0.007, 0.142]


def test_a_budget_is_its_own_value():
    budget = Budget.ratio(0.3)
    assert Budget.of(budget) is budget


NOTHING = [0, -1, "0", "-1", 0.0, -0.2, "0.0", "-0.2", "0%", "-5%", "0B", "0.5B", "-2GiB"]
TOO_MUCH = [1.0001, 2.0, "1.5", "101%", float("nan"), float("inf")]
NO_BUDGET = [True, False, None, [512], 1j]
NO_SIZE = [
    "1.2.3",
    ".",
    "..",
    "1.2.3%",
    "1..5GiB",
    "",
    "  ",
    "many",
    "2XiB",
    "GiB",
    "nan",
    "inf",
    "1e3",
    "%",
    "12 34",
    "0x10",
    "2 Gi B",
]


@pytest.mark.parametrize("value", [*NOTHING, *TOO_MUCH, *NO_BUDGET, *NO_SIZE])
def test_nonsense_is_refused(value):
    with pytest.raises(BudgetError):
        Budget.of(value)


@pytest.mark.parametrize("make", [Budget.tokens, Budget.ratio, Budget.bytes])
@pytest.mark.parametrize("amount", [0, -3, "x", True, float("inf"), float("nan")])
def test_every_constructor_wants_more_than_nothing(make, amount):
    with pytest.raises(BudgetError):
        make(amount)


def test_tokens_are_whole():
    with pytest.raises(BudgetError, match="whole"):
        Budget.tokens(2.7)


def test_a_refusal_is_a_value_error_that_names_the_culprit():
    assert issubclass(BudgetError, KvfoldError)
    assert issubclass(KvfoldError, ValueError)
    with pytest.raises(ValueError, match=r"1\.5.*for tokens give an int"):
        Budget.of(1.5)
    with pytest.raises(ValueError, match=r"'many'.*512MiB"):
        Budget.of("many")


@given(percent=st.integers(1, 100), seen=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_ratio_is_floored_as_in_exact_arithmetic(percent, seen):
    expected = percent * seen // 100
    assert Budget.of(percent / 100).per_layer(seen, **ONE) == expected
    assert Budget.of(f"{percent}%").per_layer(seen, **ONE) == expected


@pytest.mark.parametrize(
    ("ratio", "seen"), [(0.29, 100), (0.57, 100), (0.1, 30), (0.7, 10), (0.3, 9), (0.999, 999)]
)
def test_a_ratio_survives_binary_rounding(ratio, seen):
    expected = int(Fraction(str(ratio)) * seen)
    assert Budget.ratio(ratio).per_layer(seen, **ONE) == expected


@given(seen=st.integers(1, 10_000), layers=st.integers(1, 80))
@settings(max_examples=50, deadline=None)
def test_a_ratio_is_floored_per_layer_before_layers_are_added_up(seen, layers):
    total = Budget.ratio(0.37).per_layer(seen, entry_bytes=260, layers=layers, heads=8, rows=3)
    assert total == (37 * seen // 100) * layers


def test_tokens_ignore_everything_but_the_layers():
    for seen, heads, rows in [(10, 1, 1), (9999, 8, 4)]:
        budget = Budget.tokens(512)
        assert budget.per_layer(seen, entry_bytes=260, layers=32, heads=heads, rows=rows) == 16_384


@given(
    size=st.integers(1, 10**12),
    entry=st.integers(1, 2000),
    layers=st.integers(1, 80),
    heads=st.integers(1, 64),
    rows=st.integers(1, 16),
)
@settings(max_examples=50, deadline=None)
def test_bytes_buy_as_many_entries_as_fit(size, entry, layers, heads, rows):
    total = Budget.bytes(size).per_layer(1000, entry, layers, heads, rows)
    step = entry * heads * rows
    assert total * step <= size < (total + 1) * step


LONG = 10**5000  # of more digits than Python writes or reads by itself


@pytest.mark.parametrize(
    "text",
    ["9" * 49, f"{2**53}", "9999999999999GiB", "9" * 5000, f"{'9' * 400}GB", "9" * 5000 + "%"],
    ids=lambda text: f"{text[:9]} of {len(text)}",
)
def test_more_than_can_be_counted_is_refused(text):
    with pytest.raises(BudgetError, match="more than can be counted"):
        Budget.of(text)


@pytest.mark.parametrize("make", [Budget.of, Budget.tokens, Budget.ratio, Budget.bytes])
@pytest.mark.parametrize("amount", [LONG, 10**400, 1e300, Fraction(LONG)], ids=range(4))
def test_numbers_beyond_a_float_are_refused_by_every_constructor(make, amount):
    with pytest.raises(BudgetError, match="more than can be counted"):
        make(amount)


@pytest.mark.parametrize("make", [Budget.of, Budget.tokens, Budget.ratio, Budget.bytes])
@pytest.mark.parametrize("amount", [-LONG, -(10**400), -1e300, -(2**53), -7, 0], ids=range(6))
def test_numbers_that_are_not_positive_are_refused_as_such(make, amount):
    with pytest.raises(BudgetError, match="must be positive"):
        make(amount)


def test_a_size_is_rounded_down_to_whole_bytes():
    assert Budget.bytes(2.7) == Budget.bytes("2.7") == Budget.bytes(2)


@pytest.mark.parametrize("text", ["many", "1e3", "100 tokens", "", "2GB/s", "-2GiB"])
def test_a_text_that_is_none_is_told_the_forms_of_a_budget(text):
    with pytest.raises(BudgetError, match=r"as a budget: write 512 for tokens, 0\.2 or 20% for a"):
        Budget.of(text)
    with pytest.raises(BudgetError, match="as a size"):
        Budget.bytes(text)
