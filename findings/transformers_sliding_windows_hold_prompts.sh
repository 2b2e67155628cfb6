#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU, Python 3.11): after a prompt, a layer with a sliding window of 8 tokens holds
# the keys and values of all 64. They are the last 7 of the prompt's own tensors, not a copy: nbytes of a slice counts
# the window, its storage the prompt, until the next forward. Memory read after a prefill, files written from it and
# copies of such a cache are those of a full cache, layer by layer.
# Output seen:
#   after the prompt: 7 tokens in the storage of 64
#   a step later: 7 tokens in the storage of 8
#   its deep copy: 7 tokens in the storage of 64
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0

cat > "$folder/windows.py" <<'PYTHON'
import copy

import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

config = Gemma3TextConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
)
model, cache = Gemma3ForCausalLM(config).eval(), DynamicCache(config=config)


def held(name, of):
    keys = of.layers[0].keys
    token = keys[:, :, :1].nbytes
    shown, stored = keys.nbytes // token, keys.untyped_storage().nbytes() // token
    print(f"{name}: {shown} tokens in the storage of {stored}")


with torch.no_grad():
    model(torch.arange(64)[None], past_key_values=cache)
    held("after the prompt", cache)
    twin = copy.deepcopy(cache)
    model(torch.tensor([[1]]), past_key_values=cache)
    held("a step later", cache)
    held("its deep copy", twin)
PYTHON

"$folder/venv/bin/python" "$folder/windows.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
after the prompt: 7 tokens in the storage of 64
a step later: 7 tokens in the storage of 8
its deep copy: 7 tokens in the storage of 64
SEEN
