# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvfold.methods.base import Forced, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.allocate.rounding import ROUNDING
from kvfold.methods.stages.select.top import highest, top, with_forced
from kvfold.observers.surprise import PromptTokens, SurpriseNeed


@register(
    "sirllm",
    paper="arXiv 2405.12528",
    formula="""
        s[t] = −ln p(token t | tokens before it) · decay^(prompts read since)
        kept = the sinks, the best, and the newest ⌊recent·(b − sinks)⌋ of the others
    """,
)
@dataclass(frozen=True)
class SirLLM(Method):
    """Keeps the tokens that surprised the model most, the first and the newest ones.

    1. A token's score is −ln of the probability that the model gave it, one number for all layers
       and heads. The first token of a prompt has the largest one of that prompt.
    2. Tokens leave between turns: a prompt that was read stays whole if it takes no more room than
       the best have, and the best of what came before it get the rest. A longer one competes.
    3. Kept tokens have consecutive positions. `decay` below 1 lets older turns fade.

    A cache reads the logits of all tokens of a prompt: read a long one with `prefill_chunk`.
    Different from the paper: older tokens leave when a prompt has been read, not before. Raises
    KvfoldError for options out of range.
    Source: Yao et al., section 3.
    """

    by_head: ClassVar[bool] = True
    sinks: int = 4  # first tokens that stay
    recent: float = 0.5  # share of the size beside the sinks that the newest tokens have
    decay: float = 1.0  # factor of all older scores at each new prompt

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks")
        self.check_range(0, 1, "recent", "decay")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(SurpriseNeed(self.decay), PromptTokens()),
            score=surprise,
            forced=Forced(sinks=self.sinks),
            select=partial(surprising_then_newest, recent=self.recent),
            positions="consecutive",
        )


def surprise(observation: Observation) -> Tensor:
    """−ln p of each entry's token `[B, H, T]`, float32."""
    return observation[SurpriseNeed]


def surprising_then_newest(
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    recent: float,
) -> Tensor:
    """Slots `[B, H, K]` of forced entries, the best scores, and the newest of the others.

    The newest have the part `recent` of what forced entries leave of `counts [B, H]`. A prompt that
    has just ended is among the best if it fits. scores, forced and positions `[B, H, T]`. Slots are
    ascending, −1 for holes.
    """
    assert observation.tokens_seen is not None
    room = counts - forced.sum(-1)
    best = room - (room.double() * recent + ROUNDING).long()
    began = observation.tokens_seen - observation[PromptTokens]
    prompt = (positions >= began.view(-1, 1, 1)) & ~forced
    fits = prompt.sum(-1, keepdim=True) <= best[..., None]
    sure = with_forced(scores, forced | (prompt & fits), positions)
    kept = forced | highest(sure, forced.sum(-1) + best)
    return top(with_forced(positions.float(), kept, positions), counts)
