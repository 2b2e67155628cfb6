# SPDX-License-Identifier: Apache-2.0
"""Score and prompts of KVzip: attention while the model repeats the text.

Source: snu-mllab/KVzip `model/wrapper.py`, `attention/score.py`.
"""

from __future__ import annotations

from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.observers.reconstruction import ContextReconstruction

# Asks for the first part; for a later one, before the last tokens of the preceding part.
PROMPTS = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with ",
    8,  # of these last tokens
)
INSTRUCTION = (
    "Given the context, answer to the following question or request without explanation.\n\n"
)


def most_attention(observation: Observation) -> Tensor:
    """Maximum attention `[B, H, T]` that each entry received during the reconstruction."""
    return observation[ContextReconstruction]
