# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName, named
from kvfold.methods.base import Across, Method, Needs, Schedule, Stages, register, uniform
from kvfold.methods.stages.allocate.pool import candidates_of, pooled, whole_heads
from kvfold.methods.stages.score.repetition import INSTRUCTION, PROMPTS, most_attention
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.stored import OutputNorms

POOL = partial(Across, partial(candidates_of, score=most_attention), per_head=True)


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
    answer to a prompt. The opening of the chat template is kept beside the budget.
    `level="pair"` ranks all entries in one pool, `"uniform"` keeps equally many in every head,
    `"head"` keeps or empties whole heads by their highest score. `head_scores` names a file of such
    scores (.safetensors or .pt, one tensor `[L, H]`), and nothing is repeated. `questions` names a
    text file, a question a line: they are asked instead, and entries scored by their attention.
    `strict` is the released rule: of all N pairs it keeps those that score above the `int(r·N)`-th
    best, one less if no two are equal. Scores are float32; the released code uses its model's.
    `kvzip_plus` multiplies attention by ‖W_o v‖ / ‖h‖ before its maximum, v the entry's value and h
    the query's input. `demote=0.25` multiplies the scores of structural tokens: punctuation, spaces
    and line breaks that occur at least `demote_repeats` times. kvfold's own are `score="rms"`, the
    root of the mean square of attention, and `floor=0.25`, a quarter of the budget for every head.
    Raises KvfoldError for options out of range, or that exclude each other.
    Source: Kim et al., section 3; snu-mllab/KVzip; NVIDIA/kvpress `kvzip_press.py`, pull 288.
    """

    by_head: ClassVar[bool] = True
    level: Literal["pair", "uniform", "head"] = "pair"  # pool of all entries, or of heads
    chunk: int = 2000  # tokens of the text that are repeated at once
    strict: bool = False  # the released rule, scores above a threshold
    instruction: bool = False  # released sentence before the text, not in the budget
    head_scores: FileName = NO_FILE  # file of head scores, none: from the text
    questions: FileName = NO_FILE  # file of questions, none: the text is repeated
    normalize: bool = False  # attention times ‖W_o v‖ / ‖h‖ (KVzip+)
    demote: float = 0.0  # factor of the scores of structural tokens, 0: none
    demote_repeats: int = 4  # occurrences from which a token may be structural
    score: Literal["max", "rms"] = "max"  # maximum of attention, or root of its mean square
    floor: float = 0.0  # part of the mean size that every head keeps

    def __post_init__(self) -> None:
        file = named(self.head_scores)
        changed = self.normalize or self.demote or self.score != "max" or named(self.questions)
        self.check_range(1, None, "chunk", "demote_repeats")
        self.check_range(0, 1, "demote", "floor")
        for wrong, why in (
            (self.strict and self.level != "pair", "strict has one threshold: choose level=pair"),
            (file and self.level != "head", "head_scores are of heads: choose level=head"),
            (file and changed, "head_scores are taken as they are, without questions"),
            (self.floor and (self.strict or self.level != "pair"), "floor goes with a plain pool"),
        ):
            if wrong:
                raise KvfoldError(f"kvzip:{why}")

    @property
    def nested(self) -> bool:  # type: ignore[override]
        """True but for `strict`, whose threshold counts entries that were evicted before."""
        return not self.strict

    def stages(self) -> Stages:
        allocate, inexact = self._allocate()
        how = self.normalize, self.demote, self.demote_repeats, self.score == "rms"
        asked = *PROMPTS, INSTRUCTION if self.instruction else "", named(self.head_scores)
        repeated = ContextReconstruction(self.chunk, *asked, *how, named(self.questions))
        needs = Needs(repeated, OutputNorms("l2") if self.normalize else None)
        return Stages(needs=needs, score=most_attention, allocate=allocate, inexact=inexact)

    def _allocate(self) -> tuple[Schedule | Across, str]:
        if self.level == "uniform":
            return uniform, ""
        if self.level == "head":
            return POOL(whole_heads), "heads stay whole or keep nothing"
        pairs = POOL(partial(pooled, strict=self.strict, floor=self.floor), unrounded=self.strict)
        return pairs, "one threshold rounds over all heads" if self.strict else ""
