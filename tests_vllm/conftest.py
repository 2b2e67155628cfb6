# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU: one GiB of pages, one thread for each worker, no network."""

import os

import torch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
torch.set_num_threads(1)
