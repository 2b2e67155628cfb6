# SPDX-License-Identifier: Apache-2.0
"""Requests that run at once in vLLM, and tokens per second, with evictions and without.

usage: python -m benchmarks.vllm_evictions MODEL [--method snapkv] [--budget 0.25] [--every 128]
       [--prompt 2000] [--answer 1024] [--requests 48] [--fit 4] [--threads 1]

In an environment of `make test-vllm`. The pool holds `--fit` requests as they are. Stock vLLM and
the evicting one run in turn, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

BLOCK = 32
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def arithmetic(asked: argparse.Namespace) -> tuple[float, float, float]:
    """Requests that the pool holds: while all write; beside a prompt; on average over the run.

    One takes its kept entries, and on average half of what it writes between two rounds. A prompt
    that is read takes its own blocks, so the next request waits for these. Requests of one length
    then run in waves, of which the last may be small.
    """
    pool = asked.fit * (asked.prompt + asked.answer)
    one = asked.budget * asked.prompt + min(asked.every, asked.answer) / 2
    while_one_is_read = min((pool - asked.prompt) / one, asked.requests)
    waves = -(-asked.requests // int(while_one_is_read))
    return min(pool / one, asked.requests), while_one_is_read, asked.requests / waves


def run(asked: argparse.Namespace, *, evicts: bool) -> dict[str, float]:
    """Running requests, averaged over decode steps, and tokens per second of these steps."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    blocks = asked.fit * -(-(asked.prompt + asked.answer) // BLOCK) + 1
    given = {"method": asked.method, "budget": asked.budget, "every": asked.every}
    options: dict[str, Any] = {}
    if evicts:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvfoldConnector",
            kv_connector_module_path="kvfold.serve.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"evict": given},
        )
    llm = LLM(
        model=asked.model,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks,
        max_model_len=asked.prompt + asked.answer + BLOCK,
        max_num_seqs=asked.requests,
        enforce_eager=True,
        **options,
    )
    generator, engine = random.Random(0), llm.llm_engine
    for number in range(asked.requests):
        prompt = [generator.randrange(5, 2000) for _ in range(asked.prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=asked.answer, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    rows = seconds = steps = 0.0
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        written = len(engine.step())
        rows, steps = rows + written, steps + (written > 0)
        seconds += time.perf_counter() - start if written else 0.0
    whole = time.perf_counter() - began
    return {"running": rows / steps, "decode": rows / seconds, "all": rows / whole}


def main() -> None:
    """Prints both, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--budget", type=float, default=0.25)
    for name, usual in (
        ("every", 128), ("prompt", 2000), ("answer", 1024), ("requests", 48), ("fit", 4),
        ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--only", choices=("stock", "evicting"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only is not None:
        print(json.dumps(run(asked, evicts=asked.only == "evicting")))
        return
    threads = {"OMP_NUM_THREADS": str(asked.threads), "VLLM_CPU_KVCACHE_SPACE": "4"}
    found = {}
    for only in ("stock", "evicting"):
        command = [sys.executable, "-m", "benchmarks.vllm_evictions", *sys.argv[1:], "--only", only]
        environment = os.environ | SETTINGS | threads
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found[only] = json.loads(ended.stdout.splitlines()[-1])
        print(only, {name: round(value, 2) for name, value in found[only].items()}, flush=True)
    fits, beside, average = arithmetic(asked)
    print(
        f"the pool's arithmetic: {fits:.1f} requests ({fits / asked.fit:.2f} x stock's), "
        f"{beside:.1f} beside a prompt that is read, {average:.1f} in waves of equal requests"
    )
    for name in ("running", "decode", "all"):
        print(f"{name}: {found['evicting'][name] / found['stock'][name]:.2f} x stock's")


if __name__ == "__main__":
    main()
