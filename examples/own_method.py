# SPDX-License-Identifier: Apache-2.0
"""A method of your own: python examples/own_method.py [MODEL]"""

import sys
from dataclasses import dataclass

from torch import Tensor

import kvfold
from kvfold.loading import load


def value_norm(seen: kvfold.Observation) -> Tensor:
    """Norm of each entry's value `[B, H, T]`; the highest scores are kept."""
    return seen.values.float().norm(dim=-1)


@kvfold.register("value_norm")
@dataclass(frozen=True)
class ValueNorm(kvfold.Method):
    """Keeps values of high norm, the first tokens, and the newest."""

    sinks: int = 4
    recent: int = 32

    def stages(self) -> kvfold.Stages:
        forced = kvfold.Forced(sinks=self.sinks, recent=self.recent)
        return kvfold.Stages(score=value_norm, forced=forced)


# A hub id or a folder; without one, the small model that comes with kvfold.
model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "bundled")
text = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 20
prompt = tokenizer(text, return_tensors="pt").to(model.device)

# A registered name takes options, and composes with other methods.
for method in ("value_norm", "value_norm:recent=64", "value_norm + kivi:bits=4"):
    cache = kvfold.CompressedCache(model, method, budget=128)
    kvfold.generate(model, **prompt, cache=cache, max_new_tokens=8)
    print(f"{method}: {cache.stats().nbytes:,} of {cache.stats().nbytes_full:,} bytes")
