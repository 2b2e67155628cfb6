# SPDX-License-Identifier: Apache-2.0
"""Score by the newest query's attention (TOVA)."""

from torch import Tensor

from kvfold.kernels.single_query import mean_of_heads
from kvfold.methods.observation import Observation


def newest_row(observation: Observation, per_head: bool) -> Tensor:
    """Attention `[B, H, T]` of the last query: mean over all query heads, or over each group."""
    heads = observation.keys.shape[1]
    mean = mean_of_heads(observation.window_attention(1), heads if per_head else 1)
    return mean.expand(-1, heads, -1)
