# SPDX-License-Identifier: Apache-2.0
"""Score by key norm (KNorm)."""

from torch import Tensor

from kvfold.methods.observation import Observation


def negative_norm(observation: Observation) -> Tensor:
    """Scores −‖k‖₂ `[B, H, T]`, float32: keys of low norm receive high attention."""
    norms: Tensor = observation.keys.float().norm(dim=-1)
    return -norms
