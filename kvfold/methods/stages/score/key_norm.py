# SPDX-License-Identifier: Apache-2.0
"""Scores from the keys alone."""

from torch import Tensor

from kvfold.methods.observation import Observation


def negative_norm(observation: Observation) -> Tensor:
    """−‖k‖₂ of each entry: keys of low norm receive high attention."""
    norms: Tensor = observation.keys.float().norm(dim=-1)
    return -norms
