# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Forced, Measured, Method, Needs, Rounds, Stages, register
from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.learned import Scorer, learned
from kvfold.observers.fitted import EntryScorer
from kvfold.observers.stored import KeysBeforeRope


@register(
    "zap_threshold",
    paper="arXiv 2601.07891",
    formula="""
        kept[l, h] = {t : s[l, h, t] ≥ threshold, or t is one of the last window tokens}
        s = zap's score, ln of the attention that KVzip would measure
    """,
)
@dataclass(frozen=True)
class ZapThreshold(Method):
    """No budget: every head keeps the entries that KVzip is expected to need, however many.

    1. The last `window` tokens and the first `sinks` always stay.
    2. Of the others, those stay whose score by zap's fitted scorer is at least `threshold`, in
       natural logarithms: −4 is an attention of 0.018.
    3. While answering, entries that left the window are judged after each `interval` tokens.

    `file` names the scorer, as for zap. Different from KVzap, which judges a token as it leaves the
    window: `interval=1` does so, and scores all stored entries at every step.
    Raises KvfoldError for a window or sinks below 0, an interval below 1, and a threshold that is
    no number.
    Source: Jegou and Jeblick, KVzap; NVIDIA/kvpress `dms_press.py`.
    """

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True
    threshold: float = -4.0  # least score of an entry that stays
    window: int = 128  # last tokens that stay
    interval: int = 32  # generated tokens between evictions
    sinks: int = 4  # first tokens that stay
    file: FileName = NO_FILE  # fitted scorer, none: the bundled model's

    def __post_init__(self) -> None:
        if self.threshold != self.threshold:
            raise KvfoldError("zap_threshold:threshold is a number, not nan")
        self.check_range(0, None, "window", "sinks")
        self.check_range(1, None, "interval")

    def stages(self) -> Stages:
        forced = Forced(sinks=self.sinks, recent=self.window)
        return Stages(
            needs=Needs(KeysBeforeRope(), EntryScorer(FittedFile(Scorer, str(self.file)))),
            score=learned,
            allocate=Measured(
                partial(above, threshold=self.threshold, forced=forced),
                per_head=True,
                in_rounds=True,
            ),
            forced=forced,
            when=Rounds(self.interval),
        )


def above(observation: Observation, *, threshold: float, forced: Forced) -> Tensor:
    """Entries `[B, H]` of each KV head that are forced or score at least `threshold`.

    KVzap (arXiv 2601.07891), with the learned scores of the observation.
    """
    positions = observation.positions
    none = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
    stays = forced.mask(positions, none) | (observation.learned_scores() >= threshold)
    return (stays & (positions >= 0)).sum(-1)
