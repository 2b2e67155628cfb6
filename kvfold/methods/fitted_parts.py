# SPDX-License-Identifier: Apache-2.0
"""Stages with the parts of layers or heads that their file holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvfold.methods.base import Across, Stages
from kvfold.methods.stages.allocate.parts import Curve


def with_parts(stages: Stages, curve: Curve | None) -> Stages:
    """The stages, whose allocation shares a budget by `curve`; None: as they are."""
    allocate = stages.allocate
    if curve is None or not isinstance(allocate, Across):
        return stages
    share = partial(allocate.share, parts=curve)
    return replace(stages, allocate=replace(allocate, share=share, per_head=curve.per_head))
