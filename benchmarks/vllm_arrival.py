# SPDX-License-Identifier: Apache-2.0
"""Texts compressed on arrival beside the same texts in stock vLLM's prefix cache.

`python -m benchmarks.vllm_arrival`, in the environment of `make test-vllm`: documents that come
with their requests, two rounds of a question each, a pool of pages that holds some of them whole.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import Any

import httpx
from transformers import AutoConfig, AutoTokenizer

from kvfold.bundled import FOLDER
from kvfold.eval import short_ruler
from kvfold.hf.chat_template import token_count

QUESTIONS = ("What is this text about?", "Which number is it?")
COUNTED = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--method", default="kvzip + level")
    parser.add_argument("--budget", default="0.3")
    arguments = parser.parse_args()
    tokenizer, config = AutoTokenizer.from_pretrained(FOLDER), AutoConfig.from_pretrained(FOLDER)
    count = partial(token_count, tokenizer)
    made = [
        short_ruler.generate("single", arguments.tokens, count, random.Random(seed))
        for seed in range(arguments.documents)
    ]
    # Their beginnings differ: otherwise documents would share pages.
    documents = [f"Text {number}. {each.document}" for number, each in enumerate(made)]
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    with tempfile.TemporaryDirectory() as folder:
        address, process = _started(folder, arguments)
        try:
            print("| texts | tokens | bytes of each | round | found cached | loaded |")
            for own in (False, True):
                for number, question in enumerate(QUESTIONS):
                    before = _counted(address)
                    tokens = [_ask(address, each, question, own) for each in documents]
                    after = _counted(address)
                    hits, loaded = after[0] - before[0], after[1] - before[1]
                    kind = "compressed on arrival" if own else "as they are"
                    mean = sum(tokens) / len(tokens)
                    print(
                        f"| {kind} | {mean:.0f} | {mean * entry:,.0f} | {number + 1} "
                        f"| {hits:.0f} | {loaded:.0f} |",
                        flush=True,
                    )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _started(folder: str, arguments: argparse.Namespace) -> tuple[str, subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The pool is made of as many pages as fit, and the override takes fewer.
    vllm = f"--max-model-len 2048 --enforce-eager --num-gpu-blocks-override {arguments.pages}"
    command = [
        sys.executable, "-m", "kvfold", "serve", "bundled", "--engine", "vllm", "--port", str(port),
        "--folder", folder, "--method", arguments.method, "--budget", arguments.budget,
        "--vllm", vllm,
    ]  # fmt: skip
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(command, env=dict(os.environ) | own)
    address = f"http://127.0.0.1:{port}"
    while True:
        if process.poll() is not None:
            raise SystemExit("the server has ended")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health").status_code == 200:
                return address, process
        time.sleep(0.5)


def _ask(address: str, document: str, question: str, own: bool) -> int:
    """Tokens of the prompt, as vLLM counts them."""
    content = question if own else f"{document}\n\n{question}"
    body: dict[str, Any] = {"context": document} if own else {}
    body |= {"model": "bundled", "messages": [{"role": "user", "content": content}]}
    body |= {"max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def _counted(address: str) -> list[float]:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    values = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
    return [values.get(name, 0.0) for name in COUNTED]


if __name__ == "__main__":
    main()
