# SPDX-License-Identifier: Apache-2.0
"""Choose entries of an engine's own tensors: python examples/engine_policy.py [MODEL]"""

import sys

import torch
from transformers import DynamicCache

from kvfold.loading import load
from kvfold.policies import Prefill, policy, sharing_loss

TEXT = "The grass is green. The sky is blue. The sun is yellow. The magic number is 2241461. " * 8

# Any engine does: here it is transformers with its stock cache.
model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "bundled")
ids = tokenizer(TEXT, return_tensors="pt").input_ids.to(model.device)
cache = DynamicCache(config=model.config)
with torch.no_grad():
    model(ids, past_key_values=cache)

# Keys and values of the prompt, [H, T, D] for each layer; a policy copies and changes none.
prefill = Prefill(
    [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]
)
keydiff = policy("keydiff")
print(f"keydiff reads {keydiff.needs.queries} queries beside keys and values")

kept = keydiff.keep(prefill, budget=0.25)
print(f"layer 0, head 0 keeps tokens {kept.indices[0][0].tolist()[:8]} and others")

# An engine that stores whole tokens needs one set for all layers and heads.
tokens = kept.shared("mass")
loss = sharing_loss(kept, tokens, prefill)
print(f"one set of {len(tokens)} of {kept.tokens} tokens holds {loss.overlap:.0%} of the entries")
