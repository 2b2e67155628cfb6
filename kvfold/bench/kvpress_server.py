# SPDX-License-Identifier: Apache-2.0
"""Server process for kvpress, run by the Python environment that kvpress is installed in.

Reads one JSON request per line from standard input and writes one JSON answer per line to standard
output; `kvpress.py` has the client. Imports nothing of kvfold: kvpress needs an older transformers.
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
from kvpress.presses import kvzap_press, kvzip_press

Answer = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class KvpressTokenizer:
    """A tokenizer whose ids are taken modulo the model's vocabulary size."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.encode(*args, **kwargs) % self.vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def now() -> Any:
    """A timestamp: a CUDA event in the stream (no synchronisation), or the CPU's clock."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronized() -> float:
    """The CPU's clock after all launched kernels are done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class PressCache:
    """One participant's state: attention implementation, cache, head masks, tokens seen."""

    attention: str
    cache: Any
    masks: list[Any]
    seen: int


class KvpressServer:
    """A model and the caches of the participants that take turns on it; one method per request."""

    def __init__(self) -> None:
        self.model: Any = None
        self.caches: dict[str, PressCache] = {}

    def hello(self) -> Answer:
        """GPU, threads and versions of this process."""
        names = ("kvpress", "torch", "transformers")
        return {
            "gpu": torch.cuda.get_device_name() if CUDA else None,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in names},
        }

    def build(self, config: Any, path: str, tokenizer: str, dtype: str, seed: int) -> Answer:
        """Builds or loads the client's model; `check` holds 8 numbers of its last parameter."""
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
        # KVzipPress loads a tokenizer by the model's name, which a random model lacks.
        folded = KvpressTokenizer(own, model.config.vocab_size)
        kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: folded)
        # KVzapPress downloads its scorers by the model's name.
        scorer = random_scorer(model.config).to(DEVICE)
        kvzap_press.KVzapModel = SimpleNamespace(from_pretrained=lambda _: scorer)
        last = sorted(model.named_parameters())[-1][1].detach()
        return {"check": last.flatten()[:8].double().tolist()}

    def prefill(self, key: str, press: Any, ids: list[list[int]]) -> Answer:
        """Seconds to the first token, compression seconds among them, GPU peak bytes (or None)."""
        made = None if press is None else build_press(press)
        attention = "eager" if isinstance(made, kvpress.ObservedAttentionPress) else "sdpa"
        state = PressCache(attention, transformers.DynamicCache(), [], len(ids[0]))
        self._prepare(state)
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
            options = {"past_key_values": state.cache, "use_cache": True, "logits_to_keep": 1}
            self.model(input_ids=prompt, **options)
            forwarded = synchronized()
            compression = total(in_hooks)
        # KVzipPress repeats the text when the `with` block ends.
        ended = synchronized()
        if made is not None:
            compression += ended - forwarded
        peak = torch.cuda.max_memory_allocated() - before if CUDA else None
        state.masks = [module.masked_key_indices for module in self._attentions()]
        self.caches[key] = state
        return {"seconds": ended - began, "compression": compression, "peak": peak}

    def step(self, key: str, tokens: list[list[int]]) -> Answer:
        """Seconds of one decode step, with the token at its true position."""
        state = self.caches[key]
        self._prepare(state)
        new = torch.tensor(tokens, device=DEVICE)
        at = torch.full_like(new, state.seen)
        options = {"past_key_values": state.cache, "use_cache": True}
        began = synchronized()
        self.model(input_ids=new, position_ids=at, **options)
        taken = synchronized() - began
        state.seen += 1
        return {"seconds": taken}

    def cache_size(self, key: str) -> Answer:
        """Bytes of the cache, and the fraction of entries neither evicted nor masked."""
        state = self.caches[key]
        layers = state.cache.layers
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        stored = sum(layer.keys[..., 0].numel() for layer in layers)
        masked = sum(len(mask[0]) for mask in state.masks if mask is not None)
        rows, heads = layers[0].keys.shape[:2]
        return {
            "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "kept": (stored - masked) / (len(layers) * rows * heads * state.seen),
        }

    def free(self, key: str) -> Answer:
        """Drops a participant's cache."""
        self.caches.pop(key, None)
        return {}

    def mark(self) -> Answer:
        """Resets the peak resident size (VmHWM); returns the current one (VmRSS) in bytes."""
        Path("/proc/self/clear_refs").write_text("5")
        return {"bytes": memory("VmRSS")}

    def peak(self) -> Answer:
        """Peak resident size in bytes since `mark`."""
        return {"bytes": memory("VmHWM")}

    def _attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.model.model.layers]

    def _prepare(self, state: PressCache) -> None:
        """Installs a participant's attention and masks: kvpress keeps masks on the modules."""
        self.model.set_attn_implementation(state.attention)
        attentions = self._attentions()
        masks = state.masks or [None] * len(attentions)
        for attention, mask in zip(attentions, masks, strict=True):
            attention.masked_key_indices = mask


def random_scorer(config: Any) -> Any:
    """A linear KVzap of random weights for a model of that configuration."""
    shape = kvzap_press.KVzapConfig(
        input_dim=config.hidden_size,
        output_dim=config.num_key_value_heads,
        n_modules=config.num_hidden_layers,
    )
    return kvzap_press.KVzapModel(shape)


def timed(function: Callable[..., Any], spans: list[tuple[Any, Any]]) -> Callable[..., Any]:
    """`function`, wrapped to append (begin, end) timestamps of each call to `spans`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = now()
        result = function(*args, **kwargs)
        spans.append((began, now()))
        return result

    return call


def total(spans: list[tuple[Any, Any]]) -> float:
    """Total seconds of all spans; the device must be idle."""
    if CUDA:
        return float(sum(began.elapsed_time(ended) for began, ended in spans)) / 1000
    return float(sum(ended - began for began, ended in spans))


def build_press(spec: Any) -> Any:
    """The press for `[name, arguments]`; an argument may be such a pair itself."""
    name, arguments = spec
    made = {k: build_press(v) if isinstance(v, list) else v for k, v in arguments.items()}
    return getattr(kvpress, name)(**made)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights of unit gain, equal to those of `models.fill`."""
    torch.manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.normal_(0.0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)


def memory(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@torch.no_grad()
def main() -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Redirects what libraries print to standard error, so that it cannot be read as an answer.
    os.dup2(2, 1)
    server = KvpressServer()
    for line in sys.stdin:
        request = json.loads(line)
        if "threads" in request:
            torch.set_num_threads(request.pop("threads"))
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
