# SPDX-License-Identifier: Apache-2.0
"""The growing buffer: how much slack it has."""

import pytest

from kvfold.store.buffer import slack


@pytest.mark.parametrize(
    ("entries", "room"), [(0, 12), (1, 12), (768, 12), (831, 12), (832, 13), (64_000, 1000)]
)
def test_slack_is_the_larger_of_12_and_a_64th(entries, room):
    assert slack(entries) == room
