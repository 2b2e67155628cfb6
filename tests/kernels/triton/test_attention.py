# SPDX-License-Identifier: Apache-2.0
"""The kernel of a decode step against naive attention in float64, to what codes stand for."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvfold.kernels.packing import PackedValues
from kvfold.kernels.triton import Rectangle, Room, Segments, attend
from kvfold.kernels.views import Flat
from tests.helpers.gpu_inputs import DEVICE, SCALE, attended, noise
from tests.helpers.segment_kinds import (
    KINDS,
    TAIL,
    assert_near,
    encoded,
    of_every_source,
    planned,
    raw_beside,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
GROUPS = pytest.mark.parametrize("groups", [1, 3, 4, 7])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"]
)
NOTHING = Room(0, (0,) * 6)


@pytest.mark.slow
@pytest.mark.cases(30)
@GROUPS
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [64, 128, None])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_entries_of_every_kind_and_raw_ones_beside_them(kind, size, groups, dtype, split, softcap):
    """Parts that end within a source, with one, and beyond the segment's last entry."""
    old, rectangles, keys, values = of_every_source(kind, (size, size), dtype)
    query = noise(6, groups, size, seed=1, dtype=dtype)
    got = attend(query, planned(old, size=split), old, rectangles, scale=SCALE, softcap=softcap)
    assert_near(got, attended(query, keys, values, softcap), dtype)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_encoded_entries_alone(kind):
    """Segments without any give 0 and −∞."""
    old, keys, values = encoded(kind, (64, 64), torch.float32)
    query = noise(6, 3, 64, seed=1)
    plan = planned(old, (NOTHING, NOTHING))
    got = attend(query, plan, old, (None, None), scale=SCALE)
    assert_near(got, attended(query, keys, values), torch.float32)
    assert (got[0][0] == 0).all() and (got[1][0] == -torch.inf).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(64, 48), (48, 80), (16, 32)], ids=str)
def test_values_of_another_size(kind, sizes):
    old, rectangles, keys, values = of_every_source(kind, sizes, torch.float32)
    query = noise(6, 4, sizes[0], seed=1)
    got = attend(query, planned(old), old, rectangles, scale=SCALE)
    assert_near(got, attended(query, keys, values), torch.float32)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_biases_are_added_to_logits_after_the_softcap(kind, softcap):
    """Those of encoded keys lie as these do, those of the tail in its slots."""
    old, *of_old = encoded(kind, (64, 64), torch.float32)
    tail, *of_tail = raw_beside(TAIL, (64, 64), 400, torch.float32)
    bias = noise(6, TAIL.width + 9, seed=5)[:, : TAIL.width]
    biases = [rows[gap:] for rows, gap in zip(bias, TAIL.gaps, strict=True)]
    if old is not None:
        flat, counts = noise(sum(old.lengths[0]), seed=6), map(min, *old.lengths)
        old = old._replace(bias=flat)
        parts = zip(flat.split(old.lengths[0]), counts, biases, strict=True)
        biases = [torch.cat([own[:n], new]) for own, n, new in parts]
    keys, values = (
        [torch.cat(rows) for rows in zip(*parts, strict=True)]
        for parts in zip(of_old, of_tail, strict=True)
    )
    query, rectangles = noise(6, 3, 64, seed=1), (None, tail._replace(bias=bias))
    plan = planned(old, (NOTHING, TAIL), 64)
    got = attend(query, plan, old, rectangles, scale=SCALE, softcap=softcap)
    assert_near(got, attended(query, keys, values, softcap, biases), torch.float32)


@pytest.mark.parametrize("split", [64, None])
def test_what_is_not_visible_is_not_read(split):
    """Blocks and whole segments of which nothing is, and a bias of −∞, which hides as well."""
    room = Room(200, (0,) * 6)
    tail, keys, values = raw_beside(room, (64, 32), 1, torch.float32)
    visible = torch.rand(6, 200, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[0] = visible[1, :150] = visible[2, 64:] = False
    bias = torch.zeros(6, 200).masked_fill_(torch.arange(200) % 3 == 0, -torch.inf)
    seen = (visible & (bias == 0)).to(DEVICE)
    for rows in (tail.keys, tail.values):
        rows[~visible.to(DEVICE)] = torch.nan
    query = noise(6, 4, 64, seed=1)
    tail = Rectangle(tail.keys, tail.values, bias.to(DEVICE), visible.to(DEVICE))
    got = attend(query, planned(None, (NOTHING, room), split), None, (None, tail), scale=SCALE)
    keys, values = ([x[own] for x, own in zip(rows, seen, strict=True)] for rows in (keys, values))
    assert_near(got, attended(query, keys, values), torch.float32)
    assert (got[0][0] == 0).all() and (got[1][0] == -torch.inf).all()


@pytest.mark.parametrize("lowest", [False, True])
def test_sink_logits_take_a_share_of_the_weight(lowest):
    """Three rows of two heads; a sink logit may be −∞."""
    old, rectangles, keys, values = of_every_source("raw", (64, 64), torch.float32)
    query, sinks = noise(6, 4, 64, seed=1), noise(8, seed=2)
    if lowest:
        sinks[3] = -torch.inf
    given = {"scale": SCALE, "sink_logits": sinks}
    got = attend(query, planned(old, size=64), old, rectangles, **given)
    out, lse = attended(query, keys, values)
    total = torch.logaddexp(lse, sinks.double().view(2, 4).repeat(3, 1))
    share = (lse - total).exp().masked_fill(lse == -torch.inf, 0)
    assert_near(got, (out * share[..., None], total), torch.float32)


def test_large_logits_do_not_overflow():
    old, rectangles, keys, values = of_every_source("raw", (32, 32), torch.float32)
    query = 400 * noise(6, 4, 32, seed=1)
    out, lse = attend(query, planned(old, size=64), old, rectangles, scale=SCALE)
    expected = attended(query, keys, values)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


def test_rectangles_beyond_the_plan_are_refused():
    old, rectangles, _, _ = of_every_source("raw", (32, 32), torch.float32)
    plan = planned(old)
    small = replace(plan, rooms=(plan.rooms[0], plan.rooms[1] - 1))
    with pytest.raises(AssertionError):
        attend(noise(6, 4, 32, seed=1), small, old, rectangles, scale=SCALE)


def test_nothing_to_attend_to():
    """No program is launched."""
    nothing = Flat.of([noise(0, 32, seed=1)] * 6)
    old = Segments(nothing, nothing)
    plan = planned(old, (NOTHING, NOTHING))
    out, lse = attend(noise(6, 4, 32, seed=1), plan, old, (None, None), scale=SCALE)
    assert len(plan.segment) == 0 and (out == 0).all() and (lse == -torch.inf).all()


def test_what_is_packed_in_keys_alone_is_not_looked_at():
    old, keys, values = encoded("packed 4", (64, 64), torch.float32)
    old.keys.scale.rows[-1] = old.keys.minimum.rows[-1] = torch.nan
    assert old.lengths[1][-1] <= old.lengths[0][-1] - 20
    values[-1], keys[-1] = values[-1][:288], keys[-1][:288]
    shorter = PackedValues(*cropped(old.values, 12), old.values.bits, old.values.group)
    old = old._replace(values=shorter)
    query = noise(6, 4, 64, seed=1)
    got = attend(query, planned(old, (NOTHING, NOTHING)), old, (None, None), scale=SCALE)
    assert_near(got, attended(query, keys, values), torch.float32)


def cropped(packed, count):
    """Words, scales and minima without those of the last segment's last `count` entries."""
    parts = (packed.words, packed.scale, packed.minimum)
    return [Flat.of([*x.segments[:-1], x.segments[-1][:-count]]) for x in parts]


SHARED = 99 * 1024  # of compute capability 8.6 and 8.9
COMPILED = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvfold.kernels.triton.attention import _attend, launch_options

DOTS = {"fp32": tl.float32, "bf16": tl.bfloat16}
POINTERS = {
    **dict.fromkeys(("segments", "part_of", "lengths", "gaps"), "*i32"),
    **dict.fromkeys(("key_starts", "value_starts"), "*i64"),
    **dict.fromkeys(("parts", "sums", "bias", "tail_bias"), "*fp32"),
    **{"visible": "*i1", "scale": "fp32", "softcap": "fp32"},
}
ROWS = ("query", "beside_keys", "beside_values", "tail_keys", "tail_values")
OLD = ("asked", "keys", "key_scale", "key_low", "values", "value_scale", "value_low", "table")
NUMBERS = ("key_scale", "key_low", "value_scale", "value_low")
CODES = {"asked": "*fp32", "keys": "*u8", "values": "*u8", "table": "*fp32",
         "key_scale": "*fp16", "value_scale": "*fp16"}

def shared(kind, bits, size, dtype):
    number = "*" + dtype
    types = POINTERS | dict.fromkeys(ROWS, number) | {
        "raw": {"keys": number, "values": number},
        "packed": {"keys": "*i32", "values": "*i32"} | dict.fromkeys(NUMBERS, number),
        "per token": CODES,
    }[kind]
    given = launch_options(size * (4 if dtype == "fp32" else 2))
    options = {"num_stages": given.pop("num_stages"), "num_warps": 4}
    constants = dict.fromkeys((name for name in OLD if name not in types), None) | given
    constants |= {"KIND": kind, "KEY_BITS": bits, "VALUE_BITS": bits, "KEY_GROUP": 32,
                  "VALUE_GROUP": 32, "CAPPED": True, "G": 16, "D": size, "DV": size,
                  "DOT": DOTS[dtype]}
    names = _attend.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(
        fn=_attend, signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 89, 32)
    return triton.compile(source, target=target, options=options).metadata.shared

print(json.dumps({
    f"{kind} {bits} {size} {dtype}": shared(kind, bits, size, dtype)
    for size, dtype in ((256, "bf16"), (64, "fp32"), (128, "bf16"))
    for kind, bits in (("raw", 16), ("packed", 2), ("packed", 8), ("per token", 4))
}))
"""


@pytest.mark.slow
def test_the_kernel_fits_into_the_shared_memory_of_small_gpus(tmp_path, monkeypatch):
    """In a process of its own: here kernels are interpreted. Biased, masked, with all sources."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = tmp_path / "compile_kernels.py"  # Triton reads the source of kernels
    script.write_text(COMPILED)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 12
    assert {name: size for name, size in found.items() if size > SHARED} == {}
