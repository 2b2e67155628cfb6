# SPDX-License-Identifier: Apache-2.0
"""Recall against a naive reading: sets by float64 top k over the same codes, masked attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels import recalled
from kvfold.kernels.native import attention as native
from kvfold.kernels.ragged import attend_to_segments
from kvfold.kernels.recalled import RecalledKeys, RecalledValues, reads
from kvfold.kernels.views import Flat, PartView, RaggedView
from kvfold.store.recalled import Recalling
from tests.helpers.kernel_inputs import additive

SIZE, TAIL = 16, 5
NEAR = 1e-5  # logits that a float32 kernel may order otherwise


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def encoded(
    lengths: list[int], bits: int, read: float, hot: list[list[int]], dtype: torch.dtype
) -> tuple[RecalledKeys, RecalledValues]:
    """Keys and values of segments of these lengths, with entries `hot` of each."""
    encode, places = Recalling(bits, read), [torch.tensor(each, dtype=torch.long) for each in hot]
    keys, values = (
        [noise(n, SIZE, seed=seed + i).to(dtype) for i, n in enumerate(lengths)]
        for seed in (10, 20)
    )
    return encode.keys(keys, None, None).warmed(places), encode.values(values).warmed(places)


def view_of(
    keys: RecalledKeys, values: RecalledValues, batch: int, dtype: torch.dtype
) -> RaggedView:
    """A view with tails, of which every second segment lacks the first slot."""
    heads = len(keys.lengths) // batch
    gaps = tuple(i % 2 for i in range(len(keys.lengths)))
    tails = [noise(batch, heads, TAIL, SIZE, seed=seed).to(dtype) for seed in (30, 40)]
    parts = [PartView(e, t, gaps) for e, t in zip((keys, values), tails, strict=True)]
    return RaggedView(*parts, new=3)


def naive_sets(keys: RecalledKeys, query: Tensor) -> list[list[list[int]]]:
    """Entries that each query `[R, G, S, D]` reads, of each segment: hot ones and the best."""
    found = []
    for i, count in enumerate(keys.counts()):
        decoded = keys.codes.segment(i).double()
        logits = torch.einsum("gsd,nd->gsn", query[i].double(), decoded).amax(0)
        hot = keys.places.segment(i).tolist()
        of_queries = []
        for row in logits.tolist():
            cold = sorted(set(range(len(row))) - set(hot), key=lambda n: (-row[n], n))
            of_queries.append(sorted(cold[:count] + hot))
        found.append(of_queries)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_queries_read_the_best_entries_by_their_codes(groups, bits, dtype):
    keys, _ = encoded([50, 33, 0, 70], bits, 0.1, [[0, 1], [32], [], [3, 8, 40]], dtype)
    query = noise(4, groups, 4, SIZE).to(dtype)
    places, counts = keys.wanted(query), keys.counts()
    assert counts == [5, 4, 0, 7]
    for i, of_queries in enumerate(naive_sets(keys, query)):
        hot = keys.places.segment(i).tolist()
        for at, expected in zip(places[i].tolist(), of_queries, strict=True):
            own = [place for place in at if place >= 0]
            assert own == sorted(own) and len(own) == counts[i]
            assert sorted(own + hot) == expected


def test_equal_logits_go_to_the_lowest_column():
    encode = Recalling(2, 3)
    row = noise(1, SIZE)
    keys = encode.keys([row.expand(9, -1).clone()], None, None).warmed([torch.tensor([1])])
    assert keys.wanted(noise(1, 2, 1, SIZE)).tolist() == [[[0, 2, 3]]]


@pytest.mark.parametrize(
    ("read", "cold", "expected"),
    [(1.0, 7, 7), (0.02, 100, 2), (0.02, 101, 3), (0.02, 1, 1), (0.02, 0, 0), (5, 3, 3), (5, 9, 5)],
)
def test_a_share_is_rounded_up_and_a_number_is_itself(read, cold, expected):
    assert reads(read, cold) == expected


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "groups"), [(1, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}])
def test_attention_is_that_of_masked_dense_entries(queries, groups, masked, options, monkeypatch):
    monkeypatch.setattr(recalled, "BLOCK_BYTES", 2 * 4 * 7 * SIZE * 8)  # of two queries
    batch, dtype = 2, torch.float64
    keys, values = encoded([50, 33, 0, 70], 2, 0.1, [[0, 1], [32], [], [3, 8, 40]], dtype)
    stored = view_of(keys, values, batch, dtype)
    query = noise(batch, 2 * groups, queries, SIZE)
    scale, mask = SIZE**-0.5, None
    extra = {"softcap": options["softcap"]} if "softcap" in options else {}
    sinks = noise(2 * groups) if options.get("sinks") else None
    extra |= {} if sinks is None else {"sink_logits": sinks}
    shown = torch.ones(queries, 3, dtype=torch.bool).tril(3 - queries)
    if masked:
        shown = shown.expand(batch, 1, -1, -1).clone()
        shown[0, :, :, 0] = False
        mask = shown
    got = attend_to_segments(query, stored, mask, scale=scale, **extra)

    sets = naive_sets(keys, query.view(4, groups, queries, SIZE))
    for i in range(4):
        row, head = divmod(i, 2)
        gap = stored.keys.gaps[i]
        every_key = torch.cat([keys.cold.segment(i), stored.keys.tail[row, head, gap:]])
        every_value = torch.cat([values.cold.segment(i), stored.values.tail[row, head, gap:]])
        for s in range(queries):
            seen = torch.zeros(len(every_key), dtype=torch.bool)
            seen[sets[i][s]] = True
            seen[keys.lengths[i] :] = True
            seen[len(seen) - 3 :] = (shown[row, 0] if masked else shown)[s]
            for g in range(groups):
                at = head * groups + g
                logits = every_key @ query[row, at, s] * scale
                if "softcap" in options:
                    logits = torch.tanh(logits / 2) * 2
                logits = logits + additive(seen, dtype)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[at, None]])
                weights = logits.softmax(-1)[: len(every_key)]
                torch.testing.assert_close(got[row, at, s], weights @ every_value)


def test_segments_are_selected_with_what_is_hot():
    keys, values = encoded([6, 4], 2, 0.5, [[1, 2], [0]], torch.float64)
    for part in (keys, values):
        other = part.select([1, 0, 1])
        assert other.lengths == [4, 6, 4]
        assert [at.tolist() for at in other.places.segments] == [[0], [1, 2], [0]]
        fewer = part.kept([torch.tensor([2, 5]), torch.tensor([0, 3])])
        assert [at.tolist() for at in fewer.places.segments] == [[0], [0]]
        assert torch.equal(fewer.hot.segments[0], part.cold.segment(0)[2:3])
        assert isinstance(part.places, Flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_the_native_step_is_that_of_torch(groups, options, bits, dtype, monkeypatch):
    """Old entries, those that came later, hot ones, and segments of any length."""
    keys, values = encoded([50, 33, 0, 70], bits, 0.2, [[0, 1], [32], [], [3, 8, 40]], dtype)
    later = encoded([3, 0, 5, 40], bits, 0.2, [[], [], [], []], dtype)
    stored = view_of(keys.extended(later[0]), values.extended(later[1]), 2, dtype)
    query = noise(2, 2 * groups, 1, SIZE).to(dtype)
    extra = {"softcap": options["softcap"]} if "softcap" in options else {}
    extra |= {"sink_logits": noise(2 * groups)} if options.get("sinks") else {}
    called = []
    step = recalled._native_step
    monkeypatch.setattr(recalled, "_native_step", lambda *a: called.append(1) or step(*a))
    got = attend_to_segments(query, stored, None, scale=SIZE**-0.5, **extra)
    assert called == [1]
    monkeypatch.setattr(recalled, "_is_native", lambda *_: False)
    expected = attend_to_segments(query, stored, None, scale=SIZE**-0.5, **extra)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [1, 2, 100, 5000])
@pytest.mark.parametrize("kind", ["random", "equal", "signed zeros", "two values", "periodic"])
def test_the_native_choice_is_that_of_a_stable_sort(count, kind):
    """Of products that are equal in float32 as well, by keys of a single channel that differs."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, SIZE, generator=generator)
    if kind == "equal":
        rows = rows[:1].expand(count, -1)
    elif kind == "two values":
        rows = rows[:2][torch.randint(0, min(2, count), (count,), generator=generator)]
    elif kind == "periodic":  # a sample of every sixteenth is no sample of the others
        rows = rows * torch.where(torch.arange(count) % 16 == 0, 1e3, 1.0)[:, None]
    keys = Recalling(2, 0.3).keys([rows.clone()], None, None)
    query = torch.zeros(1, 2, 1, SIZE) if kind == "signed zeros" else noise(1, 2, 1, SIZE).float()
    expected = keys.wanted(query)[0, 0]
    pieces = [count], (0,)
    at, read = native.find_cold(query[:, :, 0], keys.codes, keys.places, keys.counts(), *pieces)
    assert read == keys.counts() == [len(expected)]
    assert at.tolist() == expected.tolist()
