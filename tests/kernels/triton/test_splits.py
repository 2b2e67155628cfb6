# SPDX-License-Identifier: Apache-2.0
"""Decode kernels compiled for a GPU that is not here: the shared memory that they take."""

import json
import subprocess
import sys

import pytest

SHARED = 99 * 1024  # of compute capability 8.6 and 8.9
COMPILED = """
import json, sys
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvfold.kernels.triton import per_token, quantized, ragged
from kvfold.kernels.triton.splits import launch_options

def shared(kernel, size, dtype, types, **constants):
    bytes_of_row = size * (4 if dtype == "fp32" else 2)
    given = launch_options(bytes_of_row)
    dot = tl.float32 if dtype == "fp32" else tl.bfloat16
    options = {"num_stages": given.pop("num_stages"), "num_warps": 4}
    constants |= given | {"CAPPED": True, "G": 16, "D": size, "DOT": dot}
    numbers = {"scale": "fp32", "softcap": "fp32"}
    signature = {
        name: "constexpr" if name in constants else (types | numbers).get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(
        fn=kernel, signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 89, 32)
    return triton.compile(source, target=target, options=options).metadata.shared

PARTS = {"segments": "*i32", "part_of": "*i32", "parts": "*fp32", "sums": "*fp32", "starts": "*i64"}
found = {}
for size, dtype in ((256, "bf16"), (128, "fp32"), (64, "fp32"), (128, "bf16")):
    number = "*" + dtype
    rows = PARTS | dict.fromkeys(("query", "keys", "values"), number) | {"ends": "*i64"}
    found[f"rows {size} {dtype}"] = shared(ragged._attend, size, dtype, rows, DV=size)
    scales = ("query", "key_scale", "key_minimum", "value_scale", "value_minimum")
    words = dict.fromkeys(("key_words", "value_words"), "*i32")
    extents = dict.fromkeys(("key_starts", "value_starts", "lengths"), "*i64")
    packed = PARTS | dict.fromkeys(scales, number) | words | extents
    for bits in (2, 8):
        found[f"packed {bits} {size} {dtype}"] = shared(
            quantized._attend, size, dtype, packed, KEY_BITS=bits, KEY_GROUP=32, VALUE_BITS=bits,
            VALUE_GROUP=32, VALUE_WORDS=size * bits // 32,
        )
    codes = dict.fromkeys(("key_codes", "value_codes"), "*u8")
    halves = dict.fromkeys(("key_scales", "value_scales"), "*fp16")
    alone = PARTS | codes | halves | {"query": number, "table": "*fp32"}
    found[f"alone {size} {dtype}"] = shared(
        per_token._attend, size, dtype, alone, KEY_BITS=4, VALUE_BITS=4, DV=size
    )
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kernels_fit_into_the_shared_memory_of_small_gpus(tmp_path):
    """In a process of its own: here kernels are interpreted."""
    pytest.importorskip("triton")
    script = tmp_path / "compile_kernels.py"  # Triton reads the source of kernels
    script.write_text(COMPILED)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 16
    assert {name: size for name, size in found.items() if size > SHARED} == {}
