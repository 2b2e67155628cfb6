# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, on a CPU and on a GPU."""

from dataclasses import replace

import pytest
import torch

from kvfold.kernels import dispatch
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.ragged import PATHS
from kvfold.kernels.views import Flat, PartView, RaggedView

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")


def test_paths_on_a_cpu(monkeypatch):
    query, rows = torch.zeros(1, 8, 1, 64), torch.zeros(2, 64)

    def paths():
        return [
            dispatch.step_path(query, 64),
            dispatch.packed_path(query),
            dispatch.pack_path(rows, 32),
            dispatch.gather_path(query),
        ]

    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert paths() == ["torch"] * 4
    monkeypatch.setattr(dispatch, "library", object)
    assert paths() == ["torch", "native", "torch", "torch"]
    for other in (query.double(), query.expand(1, 8, 2, 64)):
        assert dispatch.packed_path(other) == "torch"
    monkeypatch.setattr(dispatch, "library", lambda: None)
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    assert paths() == ["triton", "torch", "triton", "triton"]
    assert dispatch.step_path(query.double(), 64) == "torch"
    assert dispatch.step_path(query.expand(1, 8, 2, 64), 64) == "torch"
    wide = torch.zeros(1, 8, 1, 256)
    assert dispatch.step_path(wide, 64) == dispatch.step_path(query, 256) == "torch"
    assert dispatch.step_path(wide.half(), 64) == "triton"
    assert dispatch.pack_path(rows, 48) == "torch"
    options = {"softcap": None, "sink_logits": None, "masked": False, "squares": False}
    assert dispatch.columns_path(query, query, **options) == "torch"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert paths() == ["torch"] * 4


def test_a_step_takes_torch_where_it_is_compiled_or_learned_from(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    query = torch.zeros(1, 8, 1, 64, requires_grad=True)
    assert dispatch.step_path(query, 64) == "torch"
    with torch.no_grad():
        assert dispatch.step_path(query, 64) == "triton"
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert dispatch.step_path(query, 64) == "torch"


def test_paths_on_a_gpu(monkeypatch):
    """Only what is asked of tensors matters, so others will do."""

    class OnGpu:
        is_cuda, device, requires_grad = True, torch.device("cuda"), False

        def __init__(self, *shape, dtype=torch.bfloat16):
            self.shape, self.dtype = shape, dtype

    query, rows = OnGpu(1, 8, 1, 64), OnGpu(9, 64)
    plain = {"softcap": None}
    columns = {**plain, "sink_logits": None, "masked": False}
    assert dispatch.step_path(query, 64) == "triton"
    assert dispatch.packed_path(query) == "torch"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "triton"
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    assert dispatch.step_path(query, 64) == "torch"
    assert dispatch.rows_path(query, rows, **plain) == "varlen"
    assert dispatch.rows_path(query, OnGpu(9, 32), **plain) == "torch"
    assert dispatch.rows_path(OnGpu(1, 8, 2, 64), rows, **plain) == "torch"
    assert dispatch.rows_path(query, rows, softcap=30.0) == "torch"
    single = OnGpu(1, 8, 1, 64, dtype=torch.float32)
    assert dispatch.rows_path(single, rows, **plain) == "torch"
    assert dispatch.columns_path(query, rows, **columns, squares=False) == "flash"
    assert dispatch.columns_path(query, rows, **columns, squares=True) == "torch"
    large = OnGpu(1, 8, 1, 256)
    assert dispatch.columns_path(large, OnGpu(9, 256), **columns, squares=False) == "torch"


SCALE = {"scale": 0.25}


def segments(of_keys, of_values, *, tails=(3, 3), size=16, dtype=torch.float32):
    """Two segments of entries encoded by `of_keys` and `of_values`, behind raw tails."""

    def part(encode, size):
        tail = torch.zeros(1, 2, max(*tails, 1), size, dtype=dtype)
        return PartView(encode, tail, tuple(tail.shape[2] - n for n in tails))

    return RaggedView(part(of_keys, 16), part(of_values, size), 1)


def raw(lengths=(16, 32), size=16, dtype=torch.float32):
    return Flat.of([torch.zeros(n, size, dtype=dtype) for n in lengths])


def packed(lengths=(16, 32), dtype=torch.float32):
    rows = [torch.zeros(n, 16, dtype=dtype) for n in lengths]
    return PackedKeys.of(rows, 4, 16), PackedValues.of(rows, 4, 16)


def per_token(sinks=(1, 1), of_values=None, means=None):
    rows = [torch.ones(n, 16) for n in (16, 32)]
    keys = RotatedKeys.of(rows, 4, True, list(sinks))
    values = TokenValues.of(rows, 4, list(of_values or sinks))
    return replace(keys, means=means), values


@pytest.fixture
def on_cpu(interpreter, monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "library", object)


def path(stored, queries=1, masked=False, dtype=torch.float32, **options):
    query = torch.zeros(1, 4, queries, 16, dtype=dtype)
    return dispatch.segments_path(query, stored, masked=masked, **SCALE, **options)


SINKS = {"sink_logits": torch.zeros(4)}
ALIKE = {"lengths": (16, 16)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("chosen", "stored", "call"),
    [
        ("raw", segments(raw(), raw()), {}),
        ("raw", segments(raw(), raw(), tails=(1, 3)), {"softcap": 30.0} | SINKS),
        ("raw", segments(raw(), raw(size=8), size=8), {}),
        ("each", segments(raw(), raw(), dtype=torch.float64), {"dtype": torch.float64}),
        ("each", replace(segments(raw(), raw()), bias=segments(raw(), raw()).keys), {}),
        ("blocks", segments(raw(), raw(), tails=(0, 3)), {}),
        ("blocks", segments(raw(), raw()), {"masked": True}),
        ("blocks", segments(raw(), raw()), {"queries": 2}),
        ("even", segments(raw((16, 16)), raw((16, 16)), tails=(0, 0)), {}),
        ("even", segments(None, None), {}),
        ("blocks", segments(None, None, tails=(2, 3)), {}),
        ("blocks", segments(None, None), {"softcap": 30.0}),
        ("packed", segments(*packed()), {}),
        ("packed", segments(*packed(), tails=(0, 2)), {"softcap": 30.0} | SINKS),
        ("blocks", segments(*packed()), {"dtype": torch.float64}),
        ("even", segments(*packed((16, 16))), {"dtype": torch.float64}),
        ("blocks", segments(*packed(dtype=torch.float64)), {}),
        ("blocks", segments(packed()[0], packed(dtype=torch.bfloat16)[1]), {}),
        ("blocks", segments(packed()[0], raw()), {}),
        ("blocks", replace(segments(*packed()), bias=segments(raw(), raw()).keys), {}),
        ("per token", segments(*per_token()), {}),
        ("per token", segments(*per_token((0, 0)), tails=(1, 2)), {"softcap": 30.0} | SINKS),
        ("blocks", segments(*per_token((1, 2))), {}),
        ("blocks", segments(*per_token((1, 1), (2, 2))), {}),
        ("blocks", segments(*per_token(means=object())), {}),
        ("blocks", segments(*per_token(), tails=(0, 3)), {}),
        ("blocks", segments(*per_token()), {"dtype": torch.float64}),
    ],
)
def test_paths_of_a_call_over_segments(chosen, stored, call):
    assert path(stored, **call) == chosen and chosen in PATHS


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("chosen", "stored", "call"),
    [
        ("each", segments(raw(), raw()), {}),
        ("each", segments(raw(), raw(), tails=(1, 3)), {}),
        ("blocks", segments(raw(), raw()), {"softcap": 30.0}),
        ("blocks", segments(raw(), raw()), SINKS),
        ("blocks", segments(raw(), raw(size=8), size=8), {}),
        ("even", segments(raw((16, 16)), raw((16, 16), 8), size=8), {}),
    ],
)
def test_paths_over_raw_segments_without_a_compiler(chosen, stored, call, monkeypatch):
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert path(stored, **call) == chosen and chosen in PATHS


@pytest.mark.usefixtures("on_cpu")
def test_a_step_over_raw_entries_goes_to_cpp_where_no_graph_needs_it(monkeypatch):
    query, rows = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16)
    assert dispatch.raw_path(query, rows, rows) == "native"
    assert dispatch.raw_path(query.half(), rows, rows) == "torch"
    assert dispatch.raw_path(*(part.double() for part in (query, rows, rows))) == "torch"
    asked = query.clone().requires_grad_()
    assert dispatch.raw_path(asked, rows, rows) == "torch"
    with torch.no_grad():
        assert dispatch.raw_path(asked, rows, rows) == "native"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.raw_path(query, rows, rows) == "torch"


@pytest.mark.usefixtures("on_cpu")
def test_a_step_with_its_weights_goes_to_cpp_in_float32(monkeypatch):
    query, rows = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16)
    assert dispatch.row_path(query, rows, rows, {"scale": 1.0}) == "native"
    assert dispatch.row_path(query, rows, rows, {"scale": 1.0, "softcap": 30.0}) == "torch"
    sinks = {"scale": 1.0, "sink_logits": torch.zeros(4)}
    assert dispatch.row_path(query, rows, rows, sinks) == "torch"
    for dtype in (torch.bfloat16, torch.float64):
        given = (part.to(dtype) for part in (query, rows, rows))
        assert dispatch.row_path(*given, {"scale": 1.0}) == "torch"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch.row_path(query, rows, rows, {"scale": 1.0}) == "torch"


@pytest.mark.usefixtures("on_cpu")
def test_raw_segments_go_to_one_launch_where_a_kernel_takes_them(monkeypatch):
    monkeypatch.setattr(dispatch, "raw_path", lambda *_: "torch")
    monkeypatch.setattr(dispatch, "rows_path", lambda *_, **__: "varlen")
    stored = segments(raw(), raw())
    assert path(stored) == "rows"
    assert path(stored, masked=True) == path(stored, queries=2) == "blocks"
    assert path(replace(stored, bias=stored.keys)) == "each"
    assert path(segments(raw(), raw(), tails=(0, 3))) == "blocks"


RAW, ALONE = segments(raw(), raw()), segments(*per_token())


@pytest.mark.parametrize(
    ("chosen", "stored", "call"),
    [
        ("planned", RAW, {"softcap": 30.0} | SINKS),
        ("planned", segments(raw(), raw(size=8), size=8, tails=(0, 3)), {}),
        ("planned", segments(None, None, tails=(2, 3)), {}),
        ("planned", segments(*packed(), tails=(0, 2)), {}),
        ("planned", segments(packed()[0], packed(dtype=torch.bfloat16)[1]), {}),
        ("planned", segments(*per_token((0, 0)), tails=(0, 2)), {}),
        ("planned", replace(RAW, bias=RAW.keys), {}),
        ("planned", replace(segments(None, None), bias=segments(None, None).keys), {}),
        ("blocks", RAW, {"masked": True}),
        ("blocks", RAW, {"queries": 2}),
        ("blocks", segments(raw(), raw(), dtype=torch.float64), {"dtype": torch.float64} | SINKS),
        ("blocks", segments(packed()[0], raw()), {}),
        ("blocks", segments(raw(), None), {}),
        ("blocks", replace(segments(*packed()), bias=RAW.keys), {}),
        ("blocks", replace(segments(*packed()), bias=segments(None, None).keys), {}),
        ("blocks", segments(*per_token((1, 1), (2, 2))), {}),
        ("blocks", segments(*per_token((1, 2))), {}),
        ("blocks", segments(*per_token(means=object())), {}),
        ("blocks", replace(ALONE, values=segments(*per_token(), tails=(1, 3)).values), {}),
    ],
)
def test_one_kernel_takes_entries_that_it_reads_together(chosen, stored, call, monkeypatch):
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert path(stored, **call) == chosen and chosen in PATHS
    monkeypatch.setattr(dispatch, "step_path", lambda *_: "torch")
    assert path(stored, **call) != "planned"
