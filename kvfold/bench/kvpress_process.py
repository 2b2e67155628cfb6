# SPDX-License-Identifier: Apache-2.0
"""kvpress in a process of its own, run by the python that has it: `peers.py` asks, this answers.

One JSON request per line on standard input, one JSON answer per line on standard output. Imports
nothing of kvfold: kvpress needs an older transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
import transformers
from kvpress.presses import kvzip_press

Answer = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Folded:
    """A tokenizer whose ids are folded into the model's vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.encode(*args, **kwargs) % self.vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def now() -> Any:
    """This moment: of the processor, or in the GPU's stream, which does not wait for it."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronized() -> float:
    """The time, when all that was started is done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Reader:
    """A method's cache, its masks, and the tokens it has seen."""

    attention: str
    cache: Any
    masks: list[Any]
    seen: int


class Worker:
    """A model, and the methods that take turns on it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.readers: dict[str, Reader] = {}

    def hello(self) -> Answer:
        """What this process runs on."""
        names = ("kvpress", "torch", "transformers")
        return {
            "gpu": torch.cuda.get_device_name() if CUDA else None,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in names},
        }

    def build(self, config: Any, path: str, tokenizer: str, dtype: str, seed: int) -> Answer:
        """The same model as the asker's; `check` are its last weight's first numbers."""
        options: Any = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        model: Any
        if config is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
            model.to(DEVICE)
        else:
            with DEVICE:
                shape = transformers.LlamaConfig(**config)
                model = transformers.AutoModelForCausalLM.from_config(shape, **options)
            fill(model, seed)
        self.model = model.eval()
        own = transformers.AutoTokenizer.from_pretrained(tokenizer)
        # KVzip asks for the tokenizer of the model's name, which a random model has not.
        folded = Folded(own, model.config.vocab_size)
        kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: folded)
        last = sorted(model.named_parameters())[-1][1].detach()
        return {"check": last.flatten()[:8].double().tolist()}

    def prefill(self, key: str, press: Any, ids: list[list[int]]) -> Answer:
        """Seconds to the first token, those of them in compression, and the peak on a GPU."""
        made = None if press is None else build_press(press)
        eager = isinstance(made, kvpress.ObservedAttentionPress)
        reader = Reader("eager" if eager else "sdpa", transformers.DynamicCache(), [], len(ids[0]))
        self._prepare(reader)
        prompt = torch.tensor(ids, device=DEVICE)
        in_hooks: list[tuple[Any, Any]] = []
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if CUDA else 0
        began = synchronized()
        with contextlib.ExitStack() as stack:
            if made is not None:
                made.forward_hook = timed(made.forward_hook, in_hooks)
                stack.enter_context(made(self.model))
            options = {"past_key_values": reader.cache, "use_cache": True, "logits_to_keep": 1}
            self.model(input_ids=prompt, **options)
            forwarded = synchronized()
            compression = total(in_hooks)
        # KVzip repeats the text when its block ends.
        ended = synchronized()
        if made is not None:
            compression += ended - forwarded
        peak = torch.cuda.max_memory_allocated() - before if CUDA else None
        reader.masks = [attention.masked_key_indices for attention in self._attentions()]
        self.readers[key] = reader
        return {"seconds": ended - began, "compression": compression, "peak": peak}

    def step(self, key: str, tokens: list[list[int]]) -> Answer:
        """Seconds for one token more, at its true position."""
        reader = self.readers[key]
        self._prepare(reader)
        new = torch.tensor(tokens, device=DEVICE)
        at = torch.full_like(new, reader.seen)
        options = {"past_key_values": reader.cache, "use_cache": True}
        began = synchronized()
        self.model(input_ids=new, position_ids=at, **options)
        taken = synchronized() - began
        reader.seen += 1
        return {"seconds": taken}

    def held(self, key: str) -> Answer:
        """Bytes of the cache, and the part of all entries that is neither evicted nor masked."""
        reader = self.readers[key]
        layers = reader.cache.layers
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        stored = sum(layer.keys[..., 0].numel() for layer in layers)
        masked = sum(len(mask[0]) for mask in reader.masks if mask is not None)
        rows, heads = layers[0].keys.shape[:2]
        return {
            "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "kept": (stored - masked) / (len(layers) * rows * heads * reader.seen),
        }

    def free(self, key: str) -> Answer:
        """Forgets a cache."""
        self.readers.pop(key, None)
        return {}

    def mark(self) -> Answer:
        """Resets this process's high-water mark; returns what it uses."""
        Path("/proc/self/clear_refs").write_text("5")
        return {"bytes": memory("VmRSS")}

    def peak(self) -> Answer:
        """The most this process has used since."""
        return {"bytes": memory("VmHWM")}

    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.model.model.layers]

    def _prepare(self, reader: Reader) -> None:
        """kvpress keeps its masks on the model, one cache's at a time."""
        self.model.set_attn_implementation(reader.attention)
        attentions = self._attentions()
        masks = reader.masks or [None] * len(attentions)
        for attention, mask in zip(attentions, masks, strict=True):
            attention.masked_key_indices = mask


def timed(function: Callable[..., Any], spans: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """`function`, noting when each call began and ended."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = now()
        result = function(*args, **kwargs)
        spans.append((began, now()))
        return result

    return call


def total(spans: list[tuple[Any, Any]]) -> float:
    """Seconds of all spans; the device must be idle."""
    if CUDA:
        return float(sum(began.elapsed_time(ended) for began, ended in spans)) / 1000
    return float(sum(ended - began for began, ended in spans))


def build_press(spec: Any) -> Any:
    """["SnapKVPress", {...}] → the press; an argument may be a press itself."""
    name, arguments = spec
    made = {k: build_press(v) if isinstance(v, list) else v for k, v in arguments.items()}
    return getattr(kvpress, name)(**made)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """As `shapes.fill`."""
    torch.manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)


def memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@torch.no_grad()
def main() -> None:
    """Answers until there is nothing more to read."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print must not look like an answer.
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        if "threads" in request:
            torch.set_num_threads(request.pop("threads"))
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
