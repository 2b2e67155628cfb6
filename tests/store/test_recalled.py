# SPDX-License-Identifier: Apache-2.0
"""What a recalling store encodes, and which options it refuses."""

import math

import pytest
import torch

from kvfold import KvfoldError
from kvfold.store.encoding import EntrySize
from kvfold.store.per_token import Quantizing
from kvfold.store.recalled import Recalling


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(("entries", "encoded"), [(5, 0), (40, 0), (90, 32), (97, 32)])
def test_the_newest_stay_and_steps_come_in_lots(entries, encoded, decoding):
    """As TurboQuant's, whose codes it holds, without raw sinks."""
    other = Quantizing(sinks=0, residual=16)
    count = Recalling(residual=16).key_count(entries, encoded, decoding)
    assert count == other.key_count(entries, encoded, decoding)
    assert count <= max(0, entries - 16)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_entries_are_exact_and_codes_have_their_bits(bits):
    rows = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    keys = Recalling(bits).keys([rows[:3], rows[3:]], None, None)
    assert torch.equal(torch.cat([keys.segment(0), keys.segment(1)]), rows)
    assert keys.codes.codes.rows.shape == (7, 2 * bits)
    assert torch.equal(torch.cat(keys.segments), rows) and keys.places.lengths == [0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 5},
        {"bits": 0},
        {"read": 0},
        {"read": 1.5},
        {"read": -1},
        {"read": math.inf},
        {"read": math.nan},
        {"residual": -1},
        {"cold": 1},
        {"cold": 8},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError, match="recall:"):
        Recalling(**options)


def test_a_budget_in_bytes_is_refused():
    with pytest.raises(KvfoldError, match="the share or the number"):
        Recalling().fitting(1000, EntrySize(16, 16, 2))
