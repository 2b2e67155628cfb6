# SPDX-License-Identifier: Apache-2.0
"""Logits, kept sets, bytes and context files of every method, to compare two commits bit for bit.

    python benchmarks/bit_for_bit.py write FOLDER      # at the commit before
    python benchmarks/bit_for_bit.py compare FOLDER    # at the commit after

Every registered method, and compositions, on the bundled model: a prompt of 700 tokens and 60
decode steps for three seeds, and a padded batch of two; then a context file, which must load and
give the same logits. Run both commands on one machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

import kvfold
from kvfold import CompressedCache

PROMPT, STEPS, SEEDS, BUDGET = 700, 60, (0, 1, 2), 0.25
COMPOSED = (
    "pyramidkv + adakv",
    "h2o + merge",
    "snapkv + kivi",
    "adakv + kivi",
    "snapkv + think",
    "kvzip:level=uniform",
    "streaming_llm:positions=reindex",
    "simlayerkv:window=128",
)


def specs() -> list[str]:
    """Every registered name, and every legal composition."""
    return [*kvfold.list_methods(), *COMPOSED]


def prompts(vocabulary: int, seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Random ids `[rows, PROMPT + STEPS]` and their mask; all rows but the first are padded."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (rows, PROMPT + STEPS), generator=made)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 37 * row] = 0
    return ids, mask


def digest(*tensors: Tensor) -> str:
    """Hash of the tensors' bytes, shapes and dtypes."""
    of_all = hashlib.sha256()
    for tensor in tensors:
        of_all.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        of_all.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return of_all.hexdigest()[:16]


def observed(cache: CompressedCache, logits: list[Tensor]) -> dict[str, object]:
    """Results that must be equal."""
    stats = cache.stats()
    layers = range(len(stats.kept))
    kept = [head for i in layers for row in cache.positions(i) for head in row]
    names = ("kv_bytes", "position_bytes", "state_bytes", "slack_bytes", "nbytes_full")
    return {
        "logits": digest(*logits),
        "kept": digest(*kept),
        "entries": sum(len(head) for head in kept),
        "bytes": {name: getattr(stats, name) for name in names},
    }


@torch.no_grad()
def run(spec: str, seed: int, rows: int) -> dict[str, object]:
    """Results of one prompt, read and decoded on ids that are the same for all methods."""
    model, tokenizer = kvfold.bundled_model()
    ids, mask = prompts(model.config.vocab_size, seed, rows)
    method = kvfold.parse(spec)
    budget = BUDGET if method.takes_budget else None
    cache = CompressedCache(model, method, budget, tokenizer=tokenizer, seed=seed)
    prompt, read = ids[:, :PROMPT], mask[:, :PROMPT]
    out = kvfold.generate(
        model,
        prompt,
        cache=cache,
        attention_mask=read,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = [out.logits[0]]
    for at in range(PROMPT, PROMPT + STEPS):
        places = mask[:, : at + 1].sum(-1, keepdim=True) - 1
        step = model(
            ids[:, at : at + 1],
            attention_mask=mask[:, : at + 1],
            position_ids=places,
            past_key_values=cache,
        )
        logits.append(step.logits[:, -1])
    return observed(cache, logits)


@torch.no_grad()
def questioned(path: Path, spec: str, save: bool) -> dict[str, object]:
    """Logits of a fixed question to the context in a file, which `save` writes first."""
    model, tokenizer = kvfold.bundled_model()
    if save:
        ids, _ = prompts(model.config.vocab_size, 7, 1)
        method = kvfold.parse(spec)
        budget = BUDGET if method.takes_budget else None
        text = str(tokenizer.decode(ids[0, :PROMPT]))
        kvfold.compress(model, tokenizer, text, method, budget).save(path)
    context = kvfold.load(path, model, tokenizer)
    question, _ = prompts(model.config.vocab_size, 8, 1)
    with context.cache.frozen():
        seen = context.cache.get_seq_length()
        out = model(question[:, :20], past_key_values=context.cache)
        kept = observed(context.cache, [out.logits])
        context.cache.crop(seen - context.cache.get_seq_length())
    return kept


def attempt(work: Callable[..., dict[str, object]], *given: object) -> dict[str, object]:
    """The result of a case, or its refusal, which must be equal as well."""
    try:
        return work(*given)
    except kvfold.KvfoldError as refusal:
        return {"refused": str(refusal)}


def everything(folder: Path, save: bool) -> dict[str, dict[str, object]]:
    """Results of all cases by name."""
    found: dict[str, dict[str, object]] = {}
    for spec in track(specs(), "methods"):
        for seed in SEEDS:
            found[f"{spec} seed {seed}"] = attempt(run, spec, seed, 1)
        found[f"{spec} padded"] = attempt(run, spec, 3, 2)
        path = folder / (hashlib.sha256(spec.encode()).hexdigest()[:12] + ".kvfold")
        if save or path.exists():
            found[f"{spec} file"] = attempt(questioned, path, spec, save)
    return found


def main() -> None:
    """Writes the folder, or compares with it; exits with 1 on any difference."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("action", choices=("write", "compare"))
    arguments.add_argument("folder", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    record = given.folder / "cases.json"
    if given.action == "write":
        given.folder.mkdir(parents=True)
        record.write_text(json.dumps(everything(given.folder, save=True), indent=1))
        return
    before, after = json.loads(record.read_text()), everything(given.folder, save=False)
    differing = [
        name
        for name, case in before.items()
        if case != after.get(name) and not (name.endswith(" file") and "refused" in case)
    ]
    for name in differing:
        print(f"{name}\n  before {before[name]}\n  after  {after.get(name)}")
    print(f"{len(before) - len(differing)} of {len(before)} cases are the same")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
