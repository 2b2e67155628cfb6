#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0, CPU, reference kernels): Mamba-2 layers of Nemotron-H do not compute the same
# function for a token in a prompt and for a token that is decoded. A forward of several tokens raises time steps to
# time_step_min (0.001); a forward of one token takes them as they are. A text read token by token therefore drifts
# from the same text read at once, as soon as one time step is smaller; in pieces of two tokens it does not.
# Output seen (largest difference of logits, which are up to 7.3, from the text read at once):
#   token by token 0.25817, in pieces of two 0.00002; without a least time step 0.00002
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

torch.manual_seed(0)
torch.set_num_threads(1)
config = NemotronHConfig(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    layer_types=["mamba", "attention", "mamba", "attention"], mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8,
    chunk_size=16, experts_implementation="eager",
)
model = NemotronHForCausalLM(config).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 2 * weight.shape[-1] ** -0.5)
ids = torch.randint(1, 100, (1, 24))


@torch.no_grad()
def drift(size):
    """Largest difference of logits between pieces of `size` tokens and the whole text."""
    cache = DynamicCache(config=config)
    pieces = [model(piece, past_key_values=cache).logits for piece in ids.split(size, 1)]
    return (torch.cat(pieces, 1) - model(ids, use_cache=False).logits).abs().max().item()


with torch.no_grad():
    print(f"logits up to {model(ids, use_cache=False).logits.abs().max().item():.1f}")
steps, pairs = drift(1), drift(2)
for module in model.modules():
    if hasattr(module, "time_step_limit"):
        module.time_step_limit = (0.0, float("inf"))
unlimited = drift(1)
print(f"token by token {steps:.5f}, in pieces of two {pairs:.5f}; without a least time step {unlimited:.5f}")
assert steps > 100 * max(pairs, unlimited), "both forms treat small time steps alike now"
PYTHON
