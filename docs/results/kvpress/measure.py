# SPDX-License-Identifier: Apache-2.0
"""Kept entries of kvpress's presses beside those of their counterparts in kvfold.

    python -m docs.results.kvpress.measure PYTHON

PYTHON is the interpreter of an environment with the same torch and kvpress, which needs an older
transformers. Both libraries read the same prompts with the same random weights. For each press of
docs/kvpress.toml the number of KV heads that keep the same tokens, over all layers, prompts and
budgets, is printed and written to docs/results/kvpress/sets.json. Presses that need a file or a
download, and those that evict nothing from a prompt, are named with the reason.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
import transformers

DOCS = Path(__file__).parents[2].resolve()
KEPT = (0.25, 0.5, 0.75)  # parts of the prompt; kvpress takes one minus them
PROMPTS, LENGTH = 3, 320
# Whole chunks of 256, behind the 12 tokens that Compactor leaves out: kvpress gives the padding of
# a short last chunk its share.
WHOLE_CHUNKS = {"NonCausalAttnPress": 512, "CompactorPress": 268}
SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
Sets = list[list[list[int]]]  # positions that each head of each layer keeps


def prompts(press: str) -> list[torch.Tensor]:
    """Token ids of which no two are the same, so that a value vector names its token."""
    length = WHOLE_CHUNKS.get(press, LENGTH)
    generator = torch.Generator().manual_seed(1)
    order = [torch.randperm(SHAPE["vocab_size"], generator=generator) for _ in range(PROMPTS)]
    return [ids[None, :length] for ids in order]


@torch.no_grad()
def made_model() -> Any:
    """A Llama of random weights of unit gain."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() > 1:
            weight.normal_(0.0, 1.0 if "embed" in name else 2 * weight.shape[-1] ** -0.5)
    return model


# --- in the environment of kvpress ---------------------------------------------------------------


def pressed(folder: Path, names: list[str]) -> dict[str, Any]:
    """What each press keeps, `[prompt][part kept]`, or the reason why it did not run."""
    import kvpress

    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = [
                [kept_by_press(kvpress, folder, name, part, ids) for part in KEPT]
                for ids in prompts(name)
            ]
        except Exception as problem:
            found[name] = f"{type(problem).__name__}: {problem}".splitlines()[0][:90]
    return found


@torch.no_grad()
def kept_by_press(kvpress: Any, folder: Path, name: str, part: float, ids: torch.Tensor) -> Sets:
    """Tokens in the cache behind a press that are not masked, by their values."""
    press = eval(name if name.endswith(")") else f"{name}()", vars(kvpress))
    press.compression_ratio = 1 - part
    attention = "eager" if name == "ObservedAttentionPress" else "sdpa"
    model = loaded(folder, attention)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    full: Any = transformers.DynamicCache()
    cache: Any = transformers.DynamicCache()
    model(ids, past_key_values=full)
    with press(model):
        model(ids, past_key_values=cache)
    return [
        kept_in_layer(mine.values[0], all_.values[0], layer.self_attn.masked_key_indices)
        for mine, all_, layer in zip(cache.layers, full.layers, model.model.layers, strict=True)
    ]


@functools.cache
def loaded(folder: Path, attention: str) -> Any:
    """The model of the other process."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation=attention)


def kept_in_layer(kept: torch.Tensor, full: torch.Tensor, masked: Any) -> list[list[int]]:
    """Positions of the `kept` values `[H, K, D]` among all, without those that are `masked`."""
    exact = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(kept.double(), full.double(), compute_mode=exact).min(-1)
    if float(nearest.values.max()) > 1e-3:
        raise ValueError("its entries are no longer the prompt's own")
    hidden = (
        set() if masked is None else {*zip(*(part.tolist() for part in masked[1:]), strict=True)}
    )
    return [
        sorted(place for slot, place in enumerate(head) if (number, slot) not in hidden)
        for number, head in enumerate(nearest.indices.tolist())
    ]


# --- in the environment of kvfold ----------------------------------------------------------------


@torch.no_grad()
def kept_by_method(model: Any, spec: str, part: float, ids: torch.Tensor) -> Sets:
    """Tokens that kvfold's cache keeps of the same prompt."""
    import kvfold

    cache = kvfold.CompressedCache(model, spec, part)
    model(ids, past_key_values=cache)
    return [
        [[int(column) for column in head if column >= 0] for head in cache.positions(layer)[0]]
        for layer in range(SHAPE["num_hidden_layers"])
    ]


def equal_sets(model: Any, name: str, spec: str, theirs: list[list[Sets]]) -> tuple[int, int]:
    """Layers' KV heads with the same tokens, and all; ValueError if the press evicted nothing."""
    same = total = 0
    for ids, by_part in zip(prompts(name), theirs, strict=True):
        for part, layers in zip(KEPT, by_part, strict=True):
            if all(len(head) == ids.shape[1] for layer in layers for head in layer):
                raise ValueError("it evicts nothing from this prompt")
            for mine, other in zip(kept_by_method(model, spec, part, ids), layers, strict=True):
                same += sum(one == two for one, two in zip(mine, other, strict=True))
                total += len(mine)
    return same, total


def main(python: str) -> None:
    """Runs both libraries, prints a line for each press, and writes the equal sets."""
    rows = tomllib.loads((DOCS / "kvpress.toml").read_text("utf-8"))["press"]
    specs = {row["name"]: row["spec"] for row in rows if row["spec"]}
    with tempfile.TemporaryDirectory() as folder:
        model = made_model()
        model.save_pretrained(folder)
        call = [python, __file__, "--in-kvpress", folder, json.dumps(list(specs))]
        run = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
        theirs = json.loads(run.stdout.splitlines()[-1])
    measured = {}
    for name, spec in specs.items():
        try:
            if isinstance(theirs[name], str):
                raise ValueError(theirs[name])
            same, total = equal_sets(model, name, spec, theirs[name])
        except Exception as problem:
            print(f"{name}: not compared with {spec}: {str(problem).splitlines()[0]}")
            continue
        measured[name] = {"spec": spec, "equal": same, "of": total}
        print(f"{name}: {spec}: {same} of {total}")
    (DOCS / "results" / "kvpress" / "sets.json").write_text(
        json.dumps(measured, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1] == "--in-kvpress":
        print(json.dumps(pressed(Path(sys.argv[2]), json.loads(sys.argv[3]))))
    else:
        main(sys.argv[1])
