# SPDX-License-Identifier: Apache-2.0
"""Train the bundled model from scratch: `python -m training.train`; a rerun resumes.

Copying comes first, then single-token lookups, then needles in RULER's wording at growing lengths:
started on needles, a model of this size stays on a plateau for hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvfold.bundled import FOLDER
from training import corpus, tokenizer

LOG = Path(__file__).with_name("log.jsonl")
TRAINED_LENGTH = 4608
LEARNING_RATE = 3e-3
WARMUP = 100


@dataclass(frozen=True)
class Stage:
    """Rows of one kind and length; passed when `goal` of the looked-up tokens are right."""

    rows: str
    length: int
    batch: int
    goal: float
    steps: int = 100_000
    forms: int = 0  # ways in which facts are worded
    tasks: tuple[int, ...] = corpus.TASK_WEIGHTS  # how often each task of corpus.TURN comes
    unlisted: float = 0.0  # the part of rows whose keys are any words
    rate: float = LEARNING_RATE


STAGES = (
    Stage("copy", 64, 64, 0.9),
    Stage("lookup", 48, 96, 0.95),
    Stage("facts", 64, 64, 0.92, forms=1),
    Stage("facts", 96, 48, 0.92, forms=3),
    Stage("facts", 128, 32, 0.92, forms=5),
    Stage("needles", 256, 16, 0.75),
    Stage("needles", 512, 8, 0.8, steps=300),
    Stage("needles", 1024, 4, 0.85, steps=300),
    Stage("mixed", TRAINED_LENGTH, 1, 2.0, steps=550),
    Stage("needles", 256, 16, 2.0, steps=600, tasks=(1, 2, 5, 1, 9)),
    Stage("mixed", TRAINED_LENGTH, 1, 2.0, steps=800, tasks=(1, 4, 6, 2, 5)),
    Stage("needles", 256, 16, 2.0, steps=300, tasks=(2, 5, 4, 3, 3), unlisted=0.7, rate=1e-3),
    Stage(
        "mixed", TRAINED_LENGTH, 1, 2.0, steps=900, tasks=(2, 5, 5, 3, 3), unlisted=0.6, rate=1e-3
    ),
)
# (length, batch) of the last stage, and how often each comes.
MIXED = ((512, 8), (1024, 4), (2048, 2), (TRAINED_LENGTH, 1))
OFTEN = (2, 3, 4, 1)


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=tokenizer.VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def packed_attention(module, query, key, value, mask, scaling=None, **_):
    """Causal SDPA with the key heads repeated: on a CPU much faster than `enable_gqa`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


def rows(stage: Stage, writer: corpus.Writer) -> list[corpus.Row]:
    if stage.rows == "facts":
        return [writer.facts(stage.length, stage.forms) for _ in range(stage.batch)]
    if stage.rows == "mixed":
        length, batch = random.choices(MIXED, OFTEN)[0]
        stage = dataclasses.replace(stage, length=length, batch=batch)
    if stage.rows not in ("needles", "mixed"):
        special = len(tokenizer.SPECIAL)
        return corpus.random_rows(
            stage.rows, stage.batch, stage.length, tokenizer.VOCABULARY, special
        )
    needles = partial(writer.needles, weights=stage.tasks, unlisted=stage.unlisted)
    write = random.choices((needles, writer.repetition, writer.prose), (70, 15, 15), k=stage.batch)
    return [w(stage.length) for w in write]


def loss_and_right(model, trunk, ids, kinds):
    """Mean cross-entropy of each kind of token, summed; and the share of looked-up tokens right."""
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    kinds, labels = kinds[:, 1:], ids[:, 1:]
    counted = kinds != corpus.IGNORED
    logits = model.lm_head(hidden[counted]).float()
    kinds, labels = kinds[counted], labels[counted]
    losses = F.cross_entropy(logits, labels, reduction="none")
    # The token that must be looked up weighs as much as all the rest of the answer.
    weights = {corpus.FIRST: 1.0, corpus.ANSWER: 1.0, corpus.COPY: 1.0, corpus.TEXT: 0.3}
    loss = sum(w * losses[kinds == k].mean() for k, w in weights.items() if (kinds == k).any())
    right = logits.argmax(-1) == labels
    judged = kinds == corpus.FIRST
    judged = judged if judged.any() else kinds == corpus.COPY
    return loss, right[judged].float().mean().item() if judged.any() else None


def export(model: LlamaForCausalLM, tok: PreTrainedTokenizerBase, run: Path) -> None:
    """Puts bfloat16 weights and tokenizer into the package, and the log beside this script."""
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    # Without an index engines read every safetensors file of a folder, fitted scorers too.
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        index = {"weight_map": dict.fromkeys(sorted(file.keys()), "model.safetensors")}
    (FOLDER / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    tok.save_pretrained(FOLDER)
    shutil.copy(run / "log.jsonl", LOG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, default=Path("../shared/data/books"))
    parser.add_argument("--run", type=Path, default=Path("training/run"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage", type=int, help="start here, from the bundled weights")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.run.mkdir(parents=True, exist_ok=True)

    text = corpus.read_books(arguments.books)
    if arguments.stage is not None and not (arguments.run / "log.jsonl").exists():
        shutil.copytree(FOLDER, arguments.run, dirs_exist_ok=True)
        shutil.copy(LOG, arguments.run)
    elif not (arguments.run / "tokenizer.json").exists():
        tokenizer.train(text).save_pretrained(arguments.run)
    tok = AutoTokenizer.from_pretrained(arguments.run)
    writer = corpus.Writer(tok, text, corpus.open_words(text))

    AttentionInterface.register("packed", packed_attention)
    AttentionMaskInterface.register("packed", lambda *a, **k: None)
    torch.manual_seed(0)
    model = build()
    model.set_attn_implementation("packed")
    torch._dynamo.config.cache_size_limit = 32
    trunk = torch.compile(model.model, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    state = {"stage": 0, "step": 0, "in_stage": 0, "tokens": 0, "seconds": 0.0, "right": 0.0}
    if arguments.stage is not None:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(FOLDER).state_dict())
        state["stage"] = arguments.stage
    checkpoint = arguments.run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    random.seed(state["stage"] * 100_000 + state["step"])

    log = (arguments.run / "log.jsonl").open("a")
    started = time.time() - state["seconds"]

    def save() -> None:
        new = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
        torch.save(new, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    def note(event: str) -> None:
        line = {
            "event": event,
            **state,
            "rows": STAGES[state["stage"]].rows,
            "length": STAGES[state["stage"]].length,
        }
        print(json.dumps(line), flush=True)
        log.write(json.dumps(line) + "\n")
        log.flush()

    while state["stage"] < len(STAGES):
        stage = STAGES[state["stage"]]
        last = state["stage"] == len(STAGES) - 1
        decay = 1 - 0.95 * state["in_stage"] / stage.steps if last else 1.0
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min(1, (state["step"] + 1) / WARMUP) * decay
        earlier = [s for s in STAGES[: state["stage"]] if s.rows in ("facts", "needles")] or STAGES[
            : state["stage"]
        ]
        current = last or not earlier or random.random() < 0.75
        ids, kinds = corpus.stack(rows(stage if current else random.choice(earlier), writer))
        loss, right = loss_and_right(model, trunk, ids, kinds)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["step"] += 1
        state["tokens"] += ids.numel()
        state["seconds"] = time.time() - started
        if current:
            state["in_stage"] += 1
            if right is not None:
                state["right"] += 0.05 * (right - state["right"])
        if state["step"] % 25 == 0:
            note("step")
        if state["step"] % 100 == 0:
            save()
        if state["right"] > stage.goal or state["in_stage"] >= stage.steps:
            note("passed")
            state |= {"stage": state["stage"] + 1, "in_stage": 0, "right": 0.0}
            save()
    export(model, tok, arguments.run)


if __name__ == "__main__":
    main()
