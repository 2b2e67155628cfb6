# SPDX-License-Identifier: Apache-2.0
"""Logits, kept sets, bytes and context files of every method, to compare two commits bit for bit.

    python benchmarks/bit_for_bit.py write FOLDER      # at the commit before
    python benchmarks/bit_for_bit.py compare FOLDER    # at the commit after

Every registered method, and compositions, on the bundled model, through each way by which a cache
is read and changed: SCENARIOS. A refusal is compared by its type, as its words may improve. Files
of the commit before must load, and give the same logits. Run both commands on one machine.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import CompileConfig

import kvfold
from kvfold import CompressedCache
from kvfold.cache.fork import fork

PROMPT, BUDGET, ENTRIES, PIECE = 700, 0.25, 160, 200
COMPOSED = (
    "pyramidkv + adakv", "h2o + merge", "h2o + merge:rule=d2o", "snapkv + kivi", "adakv + kivi",
    "snapkv + think", "snapkv + reindex", "snapkv + fair:spans=0/40/300/600",
    "snapkv + criticalkv", "snapkv + match", "knorm + chunkwise", "kvzip + recent",
    "kvzip + level:rule=votes", "kvzip:level=uniform", "snapkv + curve", "kvzip + pages:size=16",
    "streaming_llm:positions=reindex", "simlayerkv:window=128", "snapkv + every:interval=128",
    "adakv + every:interval=64", "snapkv:window=16 + every:interval=16",
    "keydiff + every:interval=1", "pyramidkv + turboquant + every:interval=48",
)  # fmt: skip
Case = dict[str, Any]
bundled = functools.cache(kvfold.bundled_model)


def specs() -> list[str]:
    """Every registered name, and compositions."""
    return [*kvfold.list_methods(), *COMPOSED]


def prompts(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random ids `[rows, columns]` and their mask; all rows but the first are padded."""
    model, _ = bundled()
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, model.config.vocab_size, (rows, columns), generator=made)
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


def observed(cache: CompressedCache, logits: list[Tensor]) -> Case:
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


class Run:
    """A cache of the bundled model that reads fixed ids, and the logits that came out."""

    def __init__(self, spec: str, seed: int = 0, rows: int = 1, columns: int = PROMPT + 200):
        self.model, tokenizer = bundled()
        method = kvfold.parse(spec)
        budget = BUDGET if method.takes_budget else None
        self.cache = CompressedCache(self.model, method, budget, tokenizer=tokenizer, seed=seed)
        self.ids, self.mask = prompts(seed, rows, columns)
        self.logits: list[Tensor] = []

    def read(self, stop: int, **how: Any) -> None:
        """Reads the ids before `stop` as a prompt, and notes the logits behind it."""
        out = kvfold.generate(
            self.model,
            self.ids[:, :stop],
            cache=self.cache,
            attention_mask=self.mask[:, :stop],
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **({"max_new_tokens": 1} | how),
        )
        self.logits += out.logits

    def decode(self, start: int, stop: int, cache: CompressedCache | None = None) -> None:
        """Reads the ids from `start` to `stop` one by one."""
        for at in range(start, stop):
            step = self.model(
                self.ids[:, at : at + 1],
                attention_mask=self.mask[:, : at + 1],
                position_ids=self.mask[:, : at + 1].sum(-1, keepdim=True) - 1,
                past_key_values=cache or self.cache,
            )
            self.logits.append(step.logits[:, -1])

    def seen(self) -> Case:
        """Results of all that was read."""
        return observed(self.cache, self.logits)


def answer(steps: int, seed: int, rows: int, spec: str) -> Case:
    """A prompt, and decode steps."""
    run = Run(spec, seed, rows, PROMPT + steps)
    run.read(PROMPT)
    run.decode(PROMPT, PROMPT + steps)
    return run.seen()


def turns(spec: str) -> Case:
    """Three turns of one conversation, each with an answer that is read back."""
    run = Run(spec, 4)
    for end in (400, 500, 760):
        run.read(end)
        run.decode(end, end + 12)
    return run.seen()


def pieces(how: str, spec: str) -> Case:
    """A prompt and a later turn in pieces."""
    run = Run(spec, 5)
    for end in (PROMPT, PROMPT + 150):
        run.read(end, prefill_chunk=PIECE, compress=how)
        run.decode(end, end + 10)
    return run.seen()


def crop(spec: str) -> Case:
    """Tokens taken back within a frozen block, and steps after it."""
    run = Run(spec, 6)
    run.read(PROMPT)
    with run.cache.frozen():
        run.decode(PROMPT, PROMPT + 12)
        run.cache.crop(-5)
        run.decode(PROMPT + 7, PROMPT + 9)
        run.cache.crop(-9)
    run.decode(PROMPT, PROMPT + 20)
    return run.seen()


def crop_back(spec: str) -> Case:
    """Tokens taken back that came as any others."""
    run = Run(spec, 6)
    run.read(PROMPT)
    run.decode(PROMPT, PROMPT + 5)
    run.cache.crop(-3)
    run.decode(PROMPT + 2, PROMPT + 10)
    return run.seen()


def forks(spec: str) -> Case:
    """Two forks that read unlike tokens, and rows that are multiplied and chosen."""
    run = Run(spec, 7)
    run.read(PROMPT)
    run.decode(PROMPT, PROMPT + 5)
    readers = [fork(run.cache), fork(run.cache)]
    for start, reader in zip((PROMPT + 5, PROMPT + 50), readers, strict=True):
        question = run.ids[:, start : start + 30]
        run.logits.append(run.model(question, past_key_values=reader).logits)
    run.cache.batch_repeat_interleave(3)
    run.cache.reorder_cache(torch.tensor([2, 0, 1]))
    run.cache.batch_select_indices(torch.tensor([1]))
    run.decode(PROMPT + 5, PROMPT + 25)
    return run.seen()


def edits(spec: str) -> Case:
    """Spans dropped, moved and replaced between steps."""
    run = Run(spec, 8)
    run.read(PROMPT)
    run.cache.drop((100, 130), (400, 460))
    run.cache.move((200, 230), to=50)
    run.cache.replace((300, 310), run.ids[:, 890:895])
    length = run.cache.get_seq_length()
    run.mask = torch.ones(1, length + 100, dtype=torch.long)
    run.decode(length, length + 10)
    return run.seen()


def compiled(spec: str) -> Case:
    """An answer by one compiled graph."""
    run = Run(spec, 9)
    graph = CompileConfig(fullgraph=True, backend="eager", mode=None)  # type: ignore[arg-type]
    run.read(PROMPT, max_new_tokens=40, compile=True, compile_config=graph)
    torch._dynamo.reset()
    return run.seen()


def session(spec: str) -> Case:
    """A session that is compacted, edited, saved and loaded."""
    model, tokenizer = bundled()
    ids, _ = prompts(10, 1, 700)
    texts = [str(tokenizer.decode(part)) for part in ids[0].split(100)]
    greedy: Any = {"max_new_tokens": 8, "do_sample": False}
    bounded = kvfold.begin_session(model, tokenizer, texts[0], spec, ENTRIES)
    replies = [bounded.ask(kvfold.Message(text, "user"), **greedy) for text in texts[1:6]]
    bounded.drop("m0", now=True)
    with TemporaryDirectory() as folder:
        bounded.save(Path(folder, "session"))
        again = kvfold.load_session(Path(folder, "session"), model, tokenizer)
    replies.append(again.ask(kvfold.Message(texts[6], "user"), **greedy))
    return observed(again.cache, []) | {"replies": [reply.text for reply in replies]}


def shrink(spec: str) -> Case:
    """A context that shrinks twice."""
    model, tokenizer = bundled()
    text = str(tokenizer.decode(prompts(11, 1, PROMPT)[0][0]))
    context = kvfold.compress(model, tokenizer, text, spec, 0.5, keep_scores=True)
    smaller = context.shrink(0.3).shrink(0.1)
    return observed(smaller.cache, []) | {"answer": smaller.ask("Which?", max_new_tokens=8)}


def file(spec: str, folder: Path, save: bool) -> Case:
    """Logits of a fixed question to the context in a file, which `save` writes first."""
    model, tokenizer = bundled()
    path = folder / f"{named(spec)}.kvfold"
    if save:
        method = kvfold.parse(spec)
        budget = BUDGET if method.takes_budget else None
        text = str(tokenizer.decode(prompts(12, 1, PROMPT)[0][0]))
        kvfold.compress(model, tokenizer, text, method, budget).save(path)
    context = kvfold.load(path, model, tokenizer)
    with context.cache.frozen():
        seen = context.cache.get_seq_length()
        out = model(prompts(13, 1, 20)[0], past_key_values=context.cache)
        kept = observed(context.cache, [out.logits])
        context.cache.crop(seen - context.cache.get_seq_length())
    return kept


def named(spec: str) -> str:
    """A file's name for a method."""
    return hashlib.sha256(spec.encode()).hexdigest()[:12]


# Scenarios by name; "file" is beside them, as what it reads was written by the commit before.
SCENARIOS: dict[str, Callable[[str], Case]] = {
    "200 steps": functools.partial(answer, 200, 0, 1),
    "60 steps": functools.partial(answer, 60, 1, 1),
    "padded": functools.partial(answer, 140, 3, 2),
    "turns": turns,
    "pieces": functools.partial(pieces, "at_end"),
    "per chunk": functools.partial(pieces, "per_chunk"),
    "crop": crop,
    "crop back": crop_back,
    "forks": forks,
    "edits": edits,
    "compiled": compiled,
    "session": session,
    "shrink": shrink,
}


@contextmanager
def refusals(into: Case) -> Iterator[None]:
    """Notes the type of a refusal, which must be equal as well."""
    try:
        yield
    except (kvfold.KvfoldError, ValueError) as refusal:
        into["refused"] = type(refusal).__name__


@torch.no_grad()
def of_method(spec: str, folder: Path, save: bool) -> dict[str, Case]:
    """Results of a method in all scenarios, by name."""
    torch.set_num_threads(1)
    found: dict[str, Case] = {}
    for name, scenario in (
        SCENARIOS | {"file": functools.partial(file, folder=folder, save=save)}
    ).items():
        if name == "file" and not save and not (folder / f"{named(spec)}.kvfold").exists():
            continue
        result: Case = {}
        with refusals(result):
            result |= scenario(spec)
        found[f"{spec} {name}"] = result
    return found


def everything(folder: Path, save: bool) -> dict[str, Case]:
    """Results of all methods, two at a time: each on one thread."""
    found: dict[str, Case] = {}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        work = [pool.submit(of_method, spec, folder, save) for spec in specs()]
        for done in track(as_completed(work), "methods", total=len(work)):
            found |= done.result()
    return found


def main() -> None:
    """Writes the folder, or compares with it; exits with 1 on any difference."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("action", choices=("write", "compare"))
    arguments.add_argument("folder", type=Path)
    given = arguments.parse_args()
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
