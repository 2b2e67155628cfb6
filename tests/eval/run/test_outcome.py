# SPDX-License-Identifier: Apache-2.0
"""Usage of each row of a padded batch, against that of the row alone."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.eval.run.outcome import cache_usage
from tests.helpers.models import build, prompts


@pytest.mark.parametrize(
    ("spec", "budget"),
    [
        ("full", None),
        ("knorm", "20"),
        ("knorm", "0.2"),
        ("adakv:window=4", "0.3"),
    ],
)
def test_rows_are_counted_as_if_alone(spec: str, budget: str | None) -> None:
    model, lengths = build("llama", head_dim=128), (600, 1900, 1000)
    rows = [prompts((n,), seed=n)[0] for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(row, (1900 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([(torch.arange(1900) >= 1900 - n)[None].long() for n in lengths])

    def usage(ids, seen):
        cache = kvfold.CompressedCache(model, spec, budget)
        options = {"attention_mask": seen, "max_new_tokens": 1, "do_sample": False}
        kvfold.generate(model, ids, cache=cache, **options)
        return cache_usage(cache.stats())

    together = usage(padded, mask)
    for ours, row in zip(together, rows, strict=True):
        (alone,) = usage(row, torch.ones_like(row))
        assert (ours.seen, ours.nbytes_full) == (alone.seen, alone.nbytes_full)
        assert ours.kept == pytest.approx(alone.kept, abs=0.02)
        assert ours.nbytes == pytest.approx(alone.nbytes, rel=0.1)
