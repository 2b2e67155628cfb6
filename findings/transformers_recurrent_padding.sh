#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0, CPU): a left-padded prompt of a hybrid model (Qwen3-Next: gated delta layers
# beside attention) that is prefilled in pieces gives the logits of the text alone, unless a piece is one padded
# column: recurrent layers get no mask in a forward of one column, and take the padding for a token. No warning.
# Full-attention layers are not affected. Pieces of two columns or more are right, wherever they are cut.
# Output seen (largest difference of logits up to 5.7):
#   whole 0.00001, pieces of 2 and 23 columns 0.00002, of 1 and 24 columns 0.17296
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM

PADDING, TOKENS = 5, 20
torch.manual_seed(0)
torch.set_num_threads(1)
config = Qwen3NextConfig(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
model = Qwen3NextForCausalLM(config).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 2 * weight.shape[-1] ** -0.5)

ids = torch.randint(1, 100, (1, TOKENS))
padded = torch.nn.functional.pad(ids, (PADDING, 0))
mask = (torch.arange(PADDING + TOKENS) >= PADDING).long()[None]
positions = (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def last_logits(ends):
    cache, begin = DynamicCache(config=config), 0
    for end in ends:
        piece = {"input_ids": padded[:, begin:end], "position_ids": positions[:, begin:end]}
        out = model(**piece, attention_mask=mask[:, :end], past_key_values=cache)
        begin = end
    return out.logits[0, -1]


with torch.no_grad():
    alone = model(ids).logits[0, -1]
total = PADDING + TOKENS
whole, two, one = (float((last_logits(ends) - alone).abs().max()) for ends in ([total], [2, total], [1, total]))
print(f"whole {whole:.5f}, pieces of 2 and 23 columns {two:.5f}, of 1 and 24 columns {one:.5f}")
assert max(whole, two) < 1e-3 < 0.05 < one
PYTHON
