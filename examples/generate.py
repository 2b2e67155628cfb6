# SPDX-License-Identifier: Apache-2.0
"""Generate with a compressed cache: python examples/generate.py [MODEL]"""

import sys

import kvfold
from kvfold.loading import load

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "One of the special magic numbers for soft-bell is: 2241461. "
QUESTION = "What is the special magic number for soft-bell mentioned in the provided text?"

# A hub id or a folder; without one, the small model that comes with kvfold.
model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "bundled")

message = {"role": "user", "content": f"{NOISE * 10}{NEEDLE}{NOISE * 10}\n\n{QUESTION}"}
prompt = tokenizer.apply_chat_template(
    [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(model.device)

# SnapKV keeps a fifth of the prompt's entries: those that its last queries attend to.
cache = kvfold.CompressedCache(model, "snapkv", budget=0.2)
out = kvfold.generate(model, **prompt, cache=cache, max_new_tokens=32)

print(tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
stats = cache.stats()
print(f"{stats.nbytes:,} bytes in the cache, {stats.nbytes_full:,} in a full one")
