# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Forced, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.chunk_attention import non_causal_scores, standardized
from kvfold.methods.stages.score.leverage import leverage_scores
from kvfold.observers.chunk_sums import ChunkSumsNeed
from kvfold.observers.stored import KeysBeforeRope

REMOVED = -1.0  # `blending` that follows the part of the entries that is evicted


@register(
    "compactor",
    paper="arXiv 2507.08143",
    formula="""
        s[h, t] = blending·z(leverage)[h, t] + z(non_causal)[h, t]
        z(x) = (x − mean x) / deviation of x, over the layer
    """,
    presets={"official": {"chunk": 128, "blending": 0.5}},
)
@dataclass(frozen=True)
class Compactor(Method):
    """Keeps keys that others span least, and entries that their chunk attends to.

    1. The scores of `leverage` and of `non_causal` are computed without the `first` and `last`
       tokens, which always stay.
    2. Both are standardized over the entries of the layer, and added with the weight `blending`.

    By default that weight is the part that is evicted. Different from kvpress: rows of a batch are
    standardized apart, and a short last chunk is masked. `compactor_official` holds the chunk and
    the weight of the authors' code. Raises KvfoldError for options out of range.
    Source: Chari and Van Durme, section 3; NVIDIA/kvpress `compactor_press.py`.
    """

    sketch: int = 48  # channels of the leverage's random projection
    jitter: float = 1e-2  # of the leverage
    chunk: int = 256  # tokens that attend to one another
    blending: float = REMOVED  # weight of the leverage; -1: the part that is evicted
    first: int = 8  # first tokens that stay
    last: int = 4  # last tokens that stay

    def __post_init__(self) -> None:
        self.check_range(1, None, "sketch", "chunk")
        self.check_range(0, None, "first", "last")
        if not self.jitter > 0 or not (self.blending >= 0 or self.blending == REMOVED):
            raise KvfoldError("compactor: jitter is above 0, blending 0 or more, or -1")

    def stages(self) -> Stages:
        chunks = ChunkSumsNeed(self.chunk, self.first, self.last)
        score = partial(
            blended,
            sketch=self.sketch,
            jitter=self.jitter,
            blending=self.blending,
            ends=Forced(sinks=self.first, recent=self.last),
        )
        return Stages(
            needs=Needs(KeysBeforeRope(), chunks),
            score=score,
            forced=Forced(sinks=self.first, recent=self.last),
        )


def blended(
    observation: Observation, sketch: int, jitter: float, blending: float, ends: Forced
) -> Tensor:
    """Standardized leverage and non-causal attention `[B, H, T]`, added; 0 at the `ends`."""
    assert observation.budget is not None
    positions, budget = observation.positions, observation.budget
    stored = positions >= 0
    among = stored & ~ends.mask(positions, budget)
    leverage = leverage_scores(observation, sketch, jitter, among)
    attention = standardized(non_causal_scores(observation, among), among)
    removed = 1 - budget.view(-1, 1, 1) / stored.sum(-1, keepdim=True).clamp(min=1)
    weight = removed.clamp(min=0) if blending == REMOVED else blending
    return weight * standardized(leverage, among) + attention
