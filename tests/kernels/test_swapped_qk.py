# SPDX-License-Identifier: Apache-2.0
"""Column sums from two passes of flash attention, the second with queries and keys swapped."""

import pytest
import torch

from kvfold.kernels import dispatch
from kvfold.kernels import swapped_qk as swapped
from tests.helpers.gpu_inputs import SCALE, asked, assert_close, attention, noise
from tests.helpers.gpu_stand_ins import flash_stand_in

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])


@GROUPS
@pytest.mark.parametrize("dtype", dispatch.HALF, ids=["f16", "bf16"])
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (65, 65), (7, 66), (1, 40)])
def test_column_sums_from_two_flash_passes(queries, stored, dtype, groups, monkeypatch):
    monkeypatch.setattr(swapped, "flash", flash_stand_in)
    query, key = (x.cpu() for x in asked(2, 2, groups, queries, stored, dtype=dtype))
    key = 3 * key
    value = noise(2, 2, stored, 32, seed=3, dtype=dtype).cpu()
    counted = torch.ones(2, queries, dtype=torch.bool)
    counted[0, queries // 2 :] = False
    rows, _ = attention(query.to(DEVICE), key.to(DEVICE))
    expected = rows.cpu() @ value.double().repeat_interleave(groups, 1)
    of_counted = rows.cpu() * counted[:, None, :, None]
    for votes, weights in ((None, rows.cpu()), (counted, of_counted)):
        out, sums = swapped.column_sums_from_two_flash_passes(
            query, key, value, scale=SCALE, counted=votes
        )
        assert_close(out, expected, dtype, 5e-3)
        received = weights.unflatten(1, (2, groups)).mean(2).sum(2)
        # One column of half precision would be a hundred times worse.
        torch.testing.assert_close(sums.double(), received, rtol=3e-5, atol=1e-9)
