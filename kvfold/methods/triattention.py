# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.distant_queries import Centres, Over, distant_logits, standardized
from kvfold.methods.stages.when import Prompt, Rounds
from kvfold.observers.query_moments import QueryMomentsNeed

FARTHEST = 2**20  # positions


@register(
    "triattention",
    paper="arXiv 2604.04921",
    formula="""
        s[h, t] = max_{q in h} standardized_t (mean_δ (R(n + δ) μ[q])·k[h, t] + norms[q, t])
        norms[q, t] = Σ_pairs (mean_i |q[i]| − |μ[q]|)·|k[h, t]|;  δ = 1, 2, 4, … offsets
        μ[q]: mean of q before RoPE;  R: rotation;  n: tokens so far
    """,
    presets={"official": {"scope": "model"}},
)
@dataclass(frozen=True)
class TriAttention(Method):
    """Keeps the generated entries to which later queries are expected to attend, at any distance.

    1. A head's queries before RoPE lie around a centre: their mean. The logit that it gives a key
       is a trigonometric series in their distance; its mean over distances 1, 2, 4, … `offsets`
       is one product with the stored key.
    2. Per rotary pair, the queries' mean length beyond the centre's, times the key's, is added.
    3. Each query head's scores are standardized over the entries that may go; a KV head takes the
       largest of its query heads, after each 128 generated tokens (another number, and which
       entries count: "triattention + every:interval=64,prompt=kept").

    The prompt is kept beside the budget. Centres are of the prompt's own queries
    (`centre="running"`: of the answer's too), or, as released, of other texts: `file` names those
    that `kvfold fit MODEL TEXTS --scorer triattention` fits. Each KV head of each layer keeps
    entries of its own; `scope="model"` (`_official`) keeps the same tokens in all, by their highest
    score in any, as released. Components without RoPE are pairs of one. Raises KvfoldError
    for options out of range; models that change RoPE with the length are refused.
    Source: WeianMao/triattention `pruning_utils.py`.
    """

    offsets: int = 65536  # farthest of the distances, which are powers of 2
    aggregation: Over = "mean"  # over distances; max takes a product for each of them
    group: Over = "max"  # over the query heads of a KV head
    normalize: bool = True  # standardizes each query head's scores
    centre: Literal["prompt", "running"] = "prompt"  # of the prompt's queries, or the answer's too
    file: FileName = NO_FILE  # fitted centres, none: those of the text
    scope: Literal["head", "model"] = "head"  # heads choose alone, or all alike
    prompt: Prompt = "kept"  # the prompt is beside the size, or part of it

    def __post_init__(self) -> None:
        self.check_range(1, FARTHEST, "offsets")
        if self.centre == "running" and self.file != NO_FILE:
            raise KvfoldError("triattention: centres of a file do not run along: leave out one")

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        """True if no stage mixes KV heads."""
        return self.scope == "head"

    def stages(self) -> Stages:
        moments = QueryMomentsNeed(
            covariance=False,
            moduli=True,
            running=self.centre == "running",
            fitted=None if self.file == NO_FILE else FittedFile(Centres, str(self.file)),
        )
        return Stages(
            needs=Needs(moments),
            score=partial(at_later_distances, method=self),
            shape="best" if self.scope == "model" else None,
            when=Rounds(128, self.prompt),
        )


def at_later_distances(observation: Observation, method: TriAttention) -> Tensor:
    """Expected logits of later queries `[B, H, T]`, standardized, over the query heads; float32."""
    logits = distant_logits(observation, method.offsets, method.aggregation)
    if method.normalize:
        evictable = observation.evictable
        logits = standardized(
            logits, observation.positions >= 0 if evictable is None else evictable
        )
    return logits.mean(2) if method.group == "mean" else logits.amax(2)
