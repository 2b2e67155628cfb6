# SPDX-License-Identifier: Apache-2.0
"""Pages of rows and heads in the odd cases: what stays whole, what is forced, what is short."""

from __future__ import annotations

import torch

import kvfold
from tests.helpers.budgets import SMALL
from tests.helpers.caches import PADDED, decode, positions, start
from tests.helpers.models import build, prompts
from tests.helpers.pages import all_heads, of_row, paged, whole_beside

SNAPKV = "snapkv:window=8"


def test_rows_that_fit_stay_beside_rows_in_pages() -> None:
    cache = start(build("llama"), paged(SNAPKV, 8), PADDED, budget=26).cache  # rests 0 and 5
    for layer in positions(cache):
        assert [[len(head) for head in row] for row in layer] == [[24, 24], [29, 21], [24, 24]]
    cache = start(build("llama"), paged(SNAPKV, 7), PADDED, budget=26).cache  # rests 1 and 4
    for layer in positions(cache):
        assert [[len(head) for head in row] for row in layer] == [[29, 22], [25, 25], [24, 24]]
    assert not cache.stats().forced_over_budget


def test_forced_entries_have_their_pages() -> None:
    cache = start(build("llama"), paged("snapkv:window=17", 16)).cache
    assert {*map(len, all_heads(cache, 0))} == {32}
    assert all(head[-17:] == list(range(47, 64)) for head in all_heads(cache, 0))
    assert cache.stats().forced_over_budget


def test_forced_entries_of_the_rest_have_no_pages() -> None:
    cache = start(build("llama"), paged("snapkv:window=17", 46), budget=64 - 23).cache
    assert [list(map(len, layer)) for layer in of_row(cache, 0)] == [[64, 18]] * 4
    cache = start(build("llama"), paged("snapkv:window=17", 14)).cache
    assert [list(map(len, layer)) for layer in of_row(cache, 0)] == [[22, 22]] * 4


def test_a_page_is_kept_where_the_rest_leaves_less() -> None:
    """A rest of 20 entries of 64, in pages of 22."""
    for budget, sizes, over in ((20, [42, 20], True), (30, [42, 20], True), (31, [42, 20], False)):
        cache = start(build("llama"), paged(SNAPKV, 22), budget=budget).cache
        assert [list(map(len, layer)) for layer in of_row(cache, 0)] == [sizes] * 4
        assert cache.stats().forced_over_budget == over


def test_a_text_shorter_than_a_page_stays() -> None:
    reader = start(build("llama"), paged(SNAPKV, 32), (24, 24))
    cache = reader.cache
    assert all(len(head) == 24 for row in (0, 1) for head in all_heads(cache, row))
    assert cache.stats().forced_over_budget
    full = start(build("llama"), "full", (24, 24))
    off = torch.stack(decode(reader)) - torch.stack(decode(full))
    assert off.abs().max() < 1e-4  # packed, not dense


def test_the_rest_is_counted_in_tokens_seen_not_stored() -> None:
    """A row without the newest of its 64 tokens, which a turn of the other row brings to pages."""
    model, (ids, mask) = build("llama"), prompts((64, 64))
    cache = kvfold.CompressedCache(model, paged("knorm:skip_layers=none", 8), SMALL)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        newest = [max(map(max, layer[1])) for layer in positions(cache)]
        assert min(newest) < 63
        turn = torch.tensor([[5, 6, 7, 8, 9, 10], [0] * 6])
        whole = torch.cat([mask, (turn > 0).long()], 1)
        at = (whole.cumsum(-1) - 1)[:, -6:]
        model(turn, attention_mask=whole, position_ids=at, past_key_values=cache)
    assert whole_beside(all_heads(cache, 0), 8, 70, 70)
    assert whole_beside(all_heads(cache, 1), 8, 64, 64)
