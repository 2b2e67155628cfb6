# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.observation_window import candidate_votes, check_window
from kvfold.methods.stages.score.redundancy import redundancy, shares
from kvfold.methods.stages.when import AtEnd, Counting, Rounds

INTERVAL = 128  # generated tokens between evictions, as the paper has it


@register(
    "rkv",
    paper="arXiv 2505.24133",
    formula="""
        s[h, t] = lam·I[h, t] − (1 − lam)·R[h, t],  R = softmax_t of the mean cosine to the others
        I[h, t] = pool_{u near t} mean_{i in window} softmax_{u before it} max_{q in h} z[q, i, u]
    """,
    presets={"official": {"lam": 0.07, "spare_first": True, "phase": "absolute"}},
)
@dataclass(frozen=True)
class RKV(Method):
    """Keeps the entries that recent queries attend to, and of repeated ones the newest.

    1. Importance I: the largest logit of a KV head's query heads, for each of the last `window`
       queries; softmax over the entries before the window, mean over queries, pooled.
    2. Redundancy R: the mean cosine of an entry's key to all others, softmax over the entries. The
       latest of a key's copies (cosine above `threshold`) is not penalized for its cosine to it.
    3. The window and the best by `lam`·I − (1 − `lam`)·R stay: at the prompt's end, and after each
       128 generated tokens (another number: "rkv + every:interval=64").

    `rkv_official` has the released class's `lam`, its first entry spared by keys without a copy,
    and rounds where the whole text reaches multiples of 128. Different from the released code: each
    row of a batch is compared with its own keys, not the first row's; texts before this one are not
    counted; no matrix of all pairs exists at once. Raises KvfoldError for options out of range.
    Source: Cai et al., section 3; Zefan-Cai/R-KV `r1_kv.py`, `utils.py`.
    """

    by_head: ClassVar[bool] = True
    window: int = 8  # last queries that vote; their entries always stay
    kernel: int = 7  # neighbours that importance is pooled over, odd
    lam: float = 0.1  # weight of importance beside redundancy, 0 to 1
    threshold: float = 0.5  # cosine above which keys are copies
    retain: bool = True  # the latest of a key's copies is not penalized for it
    spare_first: bool = False  # keys without a copy spare the first entry, as released
    decode: Literal["every", "append"] = "every"  # evicts generated tokens in rounds, or adds them
    phase: Counting = "generated"  # tokens that rounds count: the answer's, or the text's

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        self.check_range(0, 1, "lam", "threshold")

    def stages(self) -> Stages:
        rounds = Rounds(INTERVAL, counting=self.phase)
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(important_and_new, method=self),
            forced=Forced(recent=self.window),
            when=rounds if self.decode == "every" else AtEnd(),
        )


def important_and_new(observation: Observation, method: RKV) -> Tensor:
    """Importance of entries less their redundancy `[B, H, T]`, float32."""
    votes = candidate_votes(observation, method.window, method.kernel, "max")
    options = method.threshold, method.retain, method.spare_first
    copies = redundancy(observation.keys, observation.positions, *options)
    return method.lam * votes - (1 - method.lam) * shares(copies, observation.positions)
