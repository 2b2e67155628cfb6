# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.methods.base import Forced, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.allocate.heads import adaptive
from kvfold.observers.query_moments import QueryMomentsNeed

FARTHEST = 2**17  # positions, which are turned one by one


@register(
    "expected_attention",
    paper="arXiv 2510.00636",
    formula="""
        s[h, t] = (mean_{q in h} softmax_t z[q, t] + epsilon)·‖v[h, t]‖
        z[q, t] = c·(R̄ μ[q])·k[h, t] + c²/2·k[h, t]ᵀ (R̄ Σ[q] R̄ᵀ) k[h, t],  c = scale of logits
        μ, Σ: mean and covariance of q before RoPE;  R̄: mean rotation of the next positions
    """,
    presets={"ada": {"epsilon": 0.02, "adaptive": True}},
)
@dataclass(frozen=True)
class ExpectedAttention(Method):
    """Keeps the entries that future queries are expected to attend to.

    1. Future queries are taken as Gaussian, with mean and covariance of the prompt's queries before
       RoPE, turned by the mean rotation of the next `future` positions.
    2. The mean of exp(logit) over them is normalized over the entries, averaged over the query
       heads of a KV head, and multiplied with the norm of the entry's value.

    The first `sinks` tokens stay; their queries and keys do not count. `adaptive` shares a layer's
    budget among its heads as `adakv` does; `epsilon` then damps the heads' highest scores.
    Different from kvpress: logits are scaled as in the model, not always by 1/√D, and padding does
    not count. Raises KvfoldError for options out of range.
    Source: Devoto et al., section 3; NVIDIA/kvpress `expected_attention_press.py`.
    """

    by_head: ClassVar[bool] = True
    future: int = 512  # positions after the prompt over which rotations are averaged
    sinks: int = 4  # first tokens that stay
    covariance: bool = True  # false: by the mean query alone
    vnorm: bool = True  # scores weighed by the norms of values
    epsilon: float = 0.0  # added to the expected attention before it is weighed
    adaptive: bool = False  # a size for each head, by need

    def __post_init__(self) -> None:
        self.check_range(1, FARTHEST, "future")
        self.check_range(0, None, "sinks", "epsilon")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(QueryMomentsNeed(self.sinks, self.covariance)),
            score=partial(expected_attention, method=self),
            heads=adaptive if self.adaptive else None,
            forced=Forced(sinks=self.sinks),
        )


def expected_attention(observation: Observation, method: ExpectedAttention) -> Tensor:
    """Expected attention of future queries `[B, H, T]`, weighed by values; float32."""
    hidden = (observation.positions < method.sinks)[:, :, None]
    logits = expected_logits(observation, method.future).masked_fill(hidden, -torch.inf)
    scores = logits.softmax(-1).masked_fill(hidden, 0).mean(2) + method.epsilon
    return scores * observation.values.float().norm(dim=-1) if method.vnorm else scores


def expected_logits(observation: Observation, future: int) -> Tensor:
    """ln E exp(logit) `[B, H, G, T]` over queries of the next `future` positions."""
    moments = observation.future_query_moments(future)
    keys, scale = observation.keys.float(), observation.scale
    mean, heads = scale * moments.mean, keys.shape[1]
    logits: Tensor = mean.unflatten(1, (heads, -1)) @ keys.transpose(-1, -2)
    if moments.covariance is not None:
        by_group = (scale**2 / 2 * moments.covariance).unflatten(1, (heads, -1)).unbind(2)
        # One query head at a time: products of all would be a tensor [B, H, G, T, D].
        for query_head, covariance in enumerate(by_group):
            logits[:, :, query_head] += ((keys @ covariance) * keys).sum(-1)
    return logits if observation.bias is None else logits + observation.bias[:, :, None]
