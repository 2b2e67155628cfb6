#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (Python 3.11): one forward with output_attentions=True leaves forward hooks on
# every layer and its attention for good. Later forwards, which ask for nothing, run them too, and neither
# output_attentions=False nor eval() takes them off. Who compiles or captures single layers, or decides by
# "has no hooks", finds another model after one look at its attention. A Llama of 2 layers.
# Output seen:
#   new: 0 hooks
#   after a plain forward: 0 hooks
#   after output_attentions=True: 4 hooks
#   after output_attentions=False: 4 hooks
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0

cat > "$folder/hooks.py" <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
)
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(5, 15)[None]


def told(when):
    parts = list(model.modules())
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)
    print(f"{when}: {hooks} hooks")


with torch.no_grad():
    told("new")
    model(ids)
    told("after a plain forward")
    model(ids, output_attentions=True)
    told("after output_attentions=True")
    model(ids, output_attentions=False)
    model.eval()
    told("after output_attentions=False")
PYTHON

"$folder/venv/bin/python" "$folder/hooks.py" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
new: 0 hooks
after a plain forward: 0 hooks
after output_attentions=True: 4 hooks
after output_attentions=False: 4 hooks
SEEN
