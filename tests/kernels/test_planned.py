# SPDX-License-Identifier: Apache-2.0
"""A step in one launch over what stores hold, and that it asks the device for no number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.kernels import dispatch, planned
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.ragged import attend_to_segments
from kvfold.kernels.single_query import attend_to_buffers
from kvfold.kernels.views import Flat, PartView, RaggedView
from kvfold.store.recalled import Recalling
from tests.helpers.budgets import compressed
from tests.helpers.gpu_inputs import DEVICE, SCALE, attended, noise
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.turns import two_padded_turns

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
BATCH, HEADS, SIZE = 2, 3, 32
OLD, TAILS = [0, 32, 64, 96, 0, 160], [4, 1, 40, 4, 2, 16]
SINKS = [1] * 6
GROUPS = pytest.mark.parametrize("groups", [1, 3, 4, 7])
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=["f32", "f16", "bf16"],
)
KINDS = ("none", "raw", "packed", "values packed less", "per token", "sinks")


def entries(lengths: list[int], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [noise(n, SIZE, seed=seed + i, dtype=dtype) for i, n in enumerate(lengths)]


def part(encoded: Any, newest: list[Tensor], width: int) -> PartView:
    """Encoded entries and a tail in a larger buffer, with nonsense where nothing is stored."""
    buffer = torch.full(
        (6, width + 40, newest[0].shape[1]), 1e4, dtype=newest[0].dtype, device=DEVICE
    )
    for into, rows in zip(buffer, newest, strict=True):
        into[width - len(rows) : width] = rows
    gaps = tuple(width - len(rows) for rows in newest)
    return PartView(encoded, buffer.unflatten(0, (BATCH, HEADS))[:, :, :width], gaps)


def stored(
    kind: str, dtype: torch.dtype = torch.float32, tails: Sequence[int] = TAILS
) -> RaggedView:
    """Two rows of three heads, whose entries are of a kind."""
    keys, values = entries(OLD, 1, dtype), entries(OLD, 50, dtype)
    width = max(tails)
    old: tuple[Any, Any] = (None, None)
    value_tails = tails
    if kind == "raw":
        old = Flat.of(keys), Flat.of(values)
    elif kind == "packed":
        old = PackedKeys.of(keys, 4, 32), PackedValues.of(values, 4, 16)
    elif kind == "values packed less":
        fewer = [n // 2 for n in OLD]
        value_tails = [n + m - few for n, m, few in zip(tails, OLD, fewer, strict=True)]
        values = [rows[:n] for rows, n in zip(values, fewer, strict=True)]
        old = PackedKeys.of(keys, 4, 32), PackedValues.of(values, 4, 16)
    elif kind in ("per token", "sinks"):
        sinks = [0] * 6 if kind == "per token" else SINKS
        if kind == "sinks":  # each segment has as many whole ones
            keys, values = ([*map(at_least_one, rows)] for rows in (keys, values))
        old = RotatedKeys.of(keys, 4, True, sinks), TokenValues.of(values, 3, sinks)
    of_keys = part(old[0], entries(tails, 100, dtype), width)
    of_values = part(old[1], entries(value_tails, 150, dtype), max(value_tails))
    return RaggedView(of_keys, of_values, 1)


def at_least_one(rows: Tensor) -> Tensor:
    return rows if len(rows) else noise(1, SIZE, seed=9, dtype=rows.dtype)


def decoded(view: RaggedView) -> tuple[list[Tensor], list[Tensor]]:
    of_keys, of_values = view.keys, view.values
    return tuple(  # type: ignore[return-value]
        [torch.cat(x.pieces(i)) for i in range(6)] for x in (of_keys, of_values)
    )


def expected_of(query: Tensor, view: RaggedView, **options: Any) -> Tensor:
    keys, values = decoded(view)
    rows = query.view(6, -1, SIZE)
    out, _ = attended(rows, keys, values, **options)
    return out.view(*query.shape)


@GROUPS
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_attention_to_what_the_store_holds(kind, dtype, tolerance, groups):
    view = stored(kind, dtype)
    query = noise(BATCH, HEADS * groups, 1, SIZE, seed=3, dtype=dtype)
    got = attend_to_segments(query, view, None, scale=SCALE)
    # Kernels read codes before they are rounded to the dtype.
    torch.testing.assert_close(
        got.double(), expected_of(query, view), rtol=tolerance, atol=tolerance
    )


@pytest.mark.filterwarnings("ignore:overflow")  # of the lowest number in base 2, to −∞
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("rows", [1, BATCH])
def test_a_mask_of_the_newest_entries_is_not_read_back(rows, additive, kind, monkeypatch):
    """As of padding in later turns; the shortest tail has three entries."""
    view = stored(kind, tails=[n + 2 for n in TAILS])
    shown = torch.tensor([[True, False, True], [False, True, True]][:rows], device=DEVICE)
    mask = shown[:, None, None]
    if additive:
        mask = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -3.4e38)
    keys, values = decoded(view)
    for i in range(6):
        own = shown[i // HEADS if rows > 1 else 0]
        keys[i], values[i] = (torch.cat([x[i][:-3], x[i][-3:][own]]) for x in (keys, values))
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=3)
    out, _ = attended(query.view(6, -1, SIZE), keys, values)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", None)
        got = attend_to_segments(query, view, mask, scale=SCALE)
    torch.testing.assert_close(got.double(), out.view(got.shape), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_other_masks_take_plain_torch(kind, monkeypatch):
    """Those of encoded entries, and of single query heads."""
    view = stored(kind)
    query = noise(BATCH, HEADS, 1, SIZE, seed=3)
    wide = torch.ones(BATCH, 1, 1, min(TAILS) + 1, dtype=torch.bool, device=DEVICE)
    by_head = wide[..., :1].repeat(1, HEADS, 1, 1)
    wide[1, :, :, 0] = by_head[0, 1] = False
    monkeypatch.setattr("kvfold.kernels.planned.attend_to_view", None)
    for mask in (wide, by_head):
        assert attend_to_segments(query, view, mask, scale=SCALE).isfinite().all()


@pytest.mark.parametrize("kind", ["none", "raw"])
@pytest.mark.parametrize("softcap", [None, 1.3])
def test_entries_with_a_bias(kind, softcap):
    view = stored(kind)
    lengths = [0] * 6 if kind == "none" else OLD
    of_old = [noise(n, 1, seed=200 + i) for i, n in enumerate(lengths)]
    of_tail = [noise(n, 1, seed=300 + i) for i, n in enumerate(TAILS)]
    bias = part(None if kind == "none" else Flat.of(of_old), of_tail, max(TAILS))
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=3)
    got = attend_to_segments(query, replace(view, bias=bias), None, scale=SCALE, softcap=softcap)
    biases = [torch.cat(pair)[:, 0] for pair in zip(of_old, of_tail, strict=True)]
    expected = expected_of(query, view, softcap=softcap, biases=biases)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@GROUPS
@DTYPES
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("read", [0.2, 7, "all are hot"])
def test_a_step_recalls_what_torch_does(read, options, dtype, tolerance, groups, monkeypatch):
    """Hot entries, cold ones that codes find, none in some segments, and tails of all lengths."""
    lengths, hot = [50, 33, 0, 70, 8, 1], [[0, 1], [32], [], [3, 8, 40], [], [0]]
    if isinstance(read, str):
        read, hot = 0.5, [[*range(n)] for n in lengths]
    encode = Recalling(2, read)
    places = [torch.tensor(each, dtype=torch.long, device=DEVICE) for each in hot]
    keys = encode.keys(entries(lengths, 1, dtype), None, None).warmed(places)
    values = encode.values(entries(lengths, 50, dtype)).warmed(places)
    newest = (entries(TAILS, seed, dtype) for seed in (100, 150))
    parts = (part(x, new, max(TAILS)) for x, new in zip((keys, values), newest, strict=True))
    query = noise(BATCH, HEADS * groups, 1, SIZE, seed=3, dtype=dtype)
    given = {"scale": SCALE, "softcap": options.get("softcap")}
    given |= {"sink_logits": noise(HEADS * groups, seed=4)} if "sinks" in options else {}
    view = RaggedView(*parts, 1)
    got = attend_to_segments(query, view, None, **given)
    double = float64(view)
    monkeypatch.setattr("kvfold.kernels.dispatch.step_path", lambda *_: "torch")
    expected = attend_to_segments(query.double(), double, None, **given)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def float64(view: RaggedView) -> RaggedView:
    """The same entries and codes, wide, so that plain torch attends to them without rounding."""

    def wide(part: PartView) -> PartView:
        old = part.encoded
        hot = replace(old.hot, rows=old.hot.rows.double())
        rows = [old.cold.segment(i).double() for i in range(6)]
        old = replace(old, cold=type(old.cold).of(rows), hot=hot)
        return replace(part, encoded=old, tail=part.tail.double())

    return replace(view, keys=wide(view.keys), values=wide(view.values))


@GROUPS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_buffers_of_a_fixed_size_are_read_where_they_are_visible(softcap, biased, groups):
    visible = torch.rand(6, 230, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    visible[:, 150:] = False  # room
    visible[2, :149] = False
    keys, values = noise(6, 230, SIZE, seed=1), noise(6, 230, 24, seed=2)
    keys[~visible] = values[~visible] = torch.nan
    bias = noise(6, 230, seed=5) if biased else None
    query = noise(BATCH, HEADS * groups, 1, SIZE, seed=3)
    buffers = [x.unflatten(0, (BATCH, HEADS)) for x in (keys, values, visible)]
    of_rows = None if bias is None else bias.unflatten(0, (BATCH, HEADS))
    got = attend_to_buffers(query, *buffers, of_rows, scale=SCALE, softcap=softcap)
    seen = [[x[i][visible[i]] for i in range(6)] for x in (keys, values)]
    biases = None if bias is None else [bias[i][visible[i]] for i in range(6)]
    out, _ = attended(query.view(6, -1, SIZE), *seen, softcap, biases)
    torch.testing.assert_close(
        got.double(), out.view(BATCH, HEADS * groups, 1, 24), rtol=2e-5, atol=2e-5
    )


class ReadBack(TorchDispatchMode):
    """Names of operations that wait for a GPU, or copy to or from it."""

    WAITING = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_unique")

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        indices = args[1] if "aten.index" in name and isinstance(args[1], list) else []
        masks = any(x is not None and x.dtype == torch.bool for x in indices)
        moved = "_to_copy" in name and kwargs.get("device") is not None
        self.all.append(name)
        if masks or moved or any(each in name for each in self.WAITING):
            self.found.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: int(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0]),
        lambda x: bool((x == 0).all()),
    ],
)
def test_what_waits_is_seen(reads):
    with ReadBack() as seen:
        reads(torch.zeros(3))
    assert seen.found


class Launches:
    """Stands for a kernel, and notes its grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.grids.append(grid)


@pytest.mark.parametrize("kind", [*KINDS, "buffers"])
def test_steps_share_a_plan_and_read_nothing_back(kind, monkeypatch):
    """No copies from the host either: all that a launch needs is on the device."""
    view, launches = stored("none" if kind == "buffers" else kind), Launches()
    buffers = [noise(BATCH, HEADS, 300, SIZE, seed=seed) for seed in (1, 2)]
    visible = torch.ones(BATCH, HEADS, 300, dtype=torch.bool, device=DEVICE)
    query = noise(BATCH, HEADS * 4, 1, SIZE, seed=3)

    def step(grown: int) -> None:
        if kind == "buffers":
            attend_to_buffers(query, *buffers, visible, scale=SCALE)
            return
        parts = (replace(x, tail=longer(x.tail, grown)) for x in (view.keys, view.values))
        attend_to_segments(query, RaggedView(*parts, 1), None, scale=SCALE)

    monkeypatch.setattr("kvfold.kernels.triton.attention._attend", launches)
    monkeypatch.setattr("kvfold.kernels.triton.online_softmax._merge", launches)
    step(0)
    monkeypatch.setattr("kvfold.kernels.triton.plan.LaunchPlan.of", None)  # none is made anew
    for reading in ("tolist", "cpu", "numpy"):  # which are no operations on a CPU
        monkeypatch.setattr(torch.Tensor, reading, None)
    before = [*launches.grids]
    assert len(before) == 2
    with ReadBack() as seen:
        for grown in range(1, 11):
            step(grown)
    assert launches.grids == before * 11
    assert seen.all and seen.found == []


def longer(tail: Tensor, grown: int) -> Tensor:
    """The tail and so many entries more of its buffer."""
    batch, heads, width, size = tail.shape
    return tail.as_strided((batch, heads, width + grown, size), tail.stride())


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("lengths", [(64,), (64, 40)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        "adakv:window=8",
        "kvzip",
        "adakv:window=8 + match",
        "kivi:group=8,residual=8",
        "adakv:window=8 + turboquant:residual=8,sinks=2",
        "adakv:window=8 + recall:read=3",
    ],
)
def test_caches_answer_as_by_plain_torch(spec, lengths, monkeypatch):
    """Two turns on a padded batch, through stores that encode and evict in between."""
    model, launched, attend = build("llama").to(DEVICE), [], planned.attend

    def noted(*args: Any, **options: Any) -> Any:
        launched.append(args)
        return attend(*args, **options)

    monkeypatch.setattr(planned, "attend", noted)
    logits = []
    for interpreted in (True, False):
        monkeypatch.setattr(dispatch, "triton_available", lambda _, found=interpreted: found)
        cache = compressed(model, spec, tokenizer=word_tokenizer())
        logits.append(two_padded_turns(model, cache, lengths, max_new_tokens=4))
        if interpreted:
            assert len(launched) >= 3 * len(model.model.layers)
            launched.clear()
    assert not launched
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
