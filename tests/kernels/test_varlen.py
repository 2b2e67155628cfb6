# SPDX-License-Identifier: Apache-2.0
"""Ragged attention through torch's variable-length kernel."""

import inspect

import pytest
import torch

from kvfold.kernels import ragged
from tests.helpers.gpu_inputs import (
    SCALE,
    assert_close,
    attended,
    noise,
    segments,
    starts_of,
)
from tests.helpers.gpu_stand_ins import varlen_stand_in

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [0, 1, 63, 64, 65, 0, 300]
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])


@GROUPS
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:4]], ids=["seven", "four"])
def test_segments_folded_into_torchs_sequences(groups, lengths, monkeypatch):
    monkeypatch.setattr(ragged, "varlen_attn", varlen_stand_in)
    keys, values = (segments(lengths, 32, seed, torch.bfloat16) for seed in (100, 200))
    query = noise(len(lengths), groups, 32, seed=1, dtype=torch.bfloat16)
    rows = (torch.cat(part).cpu() for part in (keys, values))
    starts = starts_of(lengths, torch.int32).cpu()
    out, lse = ragged.attend_to_rows_varlen(query.cpu(), *rows, starts, max(lengths), SCALE)
    expected = attended(query, keys, values)
    assert_close(out, expected[0].cpu(), torch.bfloat16)
    assert_close(lse, expected[1].cpu())


def test_torchs_kernel_has_the_parameters_that_are_given():
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    given = inspect.signature(varlen_stand_in).parameters
    known = inspect.signature(varlen_attn).parameters
    if "enable_gqa" not in known:
        pytest.skip("torch before 2.12: decoding takes other paths")
    assert all(known[name].kind == given[name].kind for name in given)
