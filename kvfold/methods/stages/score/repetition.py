# SPDX-License-Identifier: Apache-2.0
"""Score and prompts of KVzip: attention while the model repeats the text.

Source: snu-mllab/KVzip `model/wrapper.py`, `attention/score.py`.
"""

from __future__ import annotations

from torch import Tensor

from kvfold.methods.observation import ContextReconstruction, Observation

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
INSTRUCTION = (
    "Given the context, answer to the following question or request without explanation.\n\n"
)
PREVIOUS = 8  # last tokens of the preceding part, quoted after REPEAT_FROM


def repetition(
    chunk: int,
    instruction: bool,
    head_scores: str | None,
    normalize: bool,
    demote: float,
    least: int,
) -> ContextReconstruction:
    """The reconstruction with the released prompts.

    A token is structural from `least` occurrences on; `demote=0` changes no score.
    """
    return ContextReconstruction(
        chunk,
        REPEAT,
        REPEAT_FROM,
        PREVIOUS,
        INSTRUCTION if instruction else "",
        head_scores=head_scores,
        normalize=normalize,
        demote=demote or 1.0,
        demote_repeats=least,
    )


def most_attention(observation: Observation) -> Tensor:
    """Maximum attention `[B, H, T]` that each entry received during the reconstruction."""
    assert observation.reconstruction_scores is not None
    return observation.reconstruction_scores
