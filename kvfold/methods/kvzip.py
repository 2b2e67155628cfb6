# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Across, FileName, Method, Schedule, Stages, register
from kvfold.methods.observation import ContextReconstruction, Needs, Observation, OutputNorm
from kvfold.methods.stages.allocate.pool import candidates_of, pooled, whole_heads
from kvfold.methods.stages.allocate.uniform import uniform

REPEAT = "\n\nRepeat the previous context exactly."
REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "
INSTRUCTION = (
    "Given the context, answer to the following question or request without explanation.\n\n"
)
NO_FILE = FileName("none")
PREVIOUS = 8  # last tokens of the preceding part, quoted after REPEAT_FROM


@register(
    "kvzip",
    paper="arXiv 2505.23416",
    presets={"plus": {"normalize": True}},
    formula="""
        s[l, h, t] = max_{q in h, i in repetition} A[q, i, t]
        kept = the best L·H·mean size of all layers and KV heads together
    """,
)
@dataclass(frozen=True)
class KVzip(Method):
    """Keeps the entries that the model attends to most while it repeats the text.

    The text is read, and then repeated by teacher forcing in parts of `chunk` tokens, each as the
    answer to a prompt that asks for it. The opening of the chat template is kept too, and does not
    count in the budget.

    `level="pair"` ranks all entries in one pool, `"uniform"` keeps equally many in every head,
    `"head"` keeps or empties whole heads by their highest score. The paper computes head scores
    once on another sample: `head_scores` names a file of them (.safetensors or .pt, one tensor
    `[L, H]`; no comma or plus in its name), and nothing is repeated.

    `strict` is the released rule: of all N pairs it keeps those that score above the `int(r·N)`-th
    best, one less if no two are equal. Scores are float32; the released code uses its model's.
    `kvzip_plus` multiplies attention by ‖W_o v‖ / ‖h‖ before its maximum, v the entry's value and h
    the query's input. `demote=0.25` multiplies the scores of structural tokens: punctuation, spaces
    and line breaks that occur at least `demote_repeats` times; 0 changes none.

    Raises KvfoldError for a `chunk` below 1, for `strict` or `head_scores` at another level, for a
    `demote` outside [0, 1], and for options that change scores where these are a file's.
    Source: Kim et al., section 3; snu-mllab/KVzip `model/wrapper.py`, `attention/score.py`; KVzip+:
    NVIDIA/kvpress `kvzip_press.py`; demotion: its pull request 288.
    """

    by_head: ClassVar[bool] = True
    level: Literal["pair", "uniform", "head"] = "pair"  # pool of all entries, or of heads
    chunk: int = 2000  # tokens of the text that are repeated at once
    strict: bool = False  # the released rule, scores above a threshold
    instruction: bool = False  # released sentence before the text, not in the budget
    head_scores: FileName = NO_FILE  # file of head scores, none: from the text
    normalize: bool = False  # attention times ‖W_o v‖ / ‖h‖ (KVzip+)
    demote: float = 0.0  # factor of the scores of structural tokens, 0: none
    demote_repeats: int = 4  # occurrences from which a token may be structural

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise KvfoldError(f"kvzip:chunk is at least 1 token, not {self.chunk}")
        if self.strict and self.level != "pair":
            raise KvfoldError("kvzip:strict is a threshold over all pairs: choose level=pair")
        if self.head_scores != NO_FILE and self.level != "head":
            raise KvfoldError("kvzip:head_scores are of whole heads: choose level=head")
        if not 0 <= self.demote <= 1 or self.demote_repeats < 1:
            raise KvfoldError(
                "kvzip:demote is a factor from 0 to 1, of tokens with demote_repeats of at least "
                f"1, not {self.demote} and {self.demote_repeats}"
            )
        if self.head_scores != NO_FILE and (self.normalize or self.demote):
            raise KvfoldError(
                "kvzip:head_scores come from a file: normalize and demote change none of them"
            )

    @property
    def nested(self) -> bool:  # type: ignore[override]
        """True but for `strict`, whose threshold counts entries that were evicted before."""
        return not self.strict

    def stages(self) -> Stages:
        norms: OutputNorm | None = "l2" if self.normalize else None
        return Stages(
            needs=Needs(reconstruction=self._reconstruction(), output_norms=norms),
            score=most_attention,
            allocate=self._allocate(),
            inexact=self._inexact(),
        )

    def _reconstruction(self) -> ContextReconstruction:
        instruction = INSTRUCTION if self.instruction else ""
        file = None if self.head_scores == NO_FILE else self.head_scores
        return ContextReconstruction(
            self.chunk,
            REPEAT,
            REPEAT_FROM,
            PREVIOUS,
            instruction,
            head_scores=file,
            normalize=self.normalize,
            demote=self.demote or 1.0,
            demote_repeats=self.demote_repeats,
        )

    def _inexact(self) -> str:
        if self.strict:
            return "the released threshold rounds once over all heads, and leaves its own pair out"
        return "heads stay whole or keep nothing" if self.level == "head" else ""

    def _allocate(self) -> Schedule | Across:
        candidates = partial(candidates_of, score=most_attention)
        if self.level == "uniform":
            return uniform
        if self.level == "head":
            return Across(candidates, whole_heads, per_head=True)
        share = partial(pooled, strict=self.strict)
        return Across(candidates, share, per_head=True, unrounded=self.strict)


def most_attention(observation: Observation) -> Tensor:
    """Maximum attention `[B, H, T]` that each entry received during the reconstruction."""
    assert observation.reconstruction_scores is not None
    return observation.reconstruction_scores
