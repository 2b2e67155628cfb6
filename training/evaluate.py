# SPDX-License-Identifier: Apache-2.0
"""Score the bundled model with its full cache: `python -m training.evaluate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import kvfold
from kvfold.eval.retrieval import Trial, evaluate
from training.train import build

TRIALS = (
    Trial("multikey", 512),
    *(Trial(task, n) for n in (1024, 2048) for task in ("single", "multikey")),
    *(Trial(task, n) for n in (1024, 2048) for task in ("multivalue", "multiquery", "vt")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="score a training state instead")
    parser.add_argument("--out", type=Path, default=Path("training/scores.json"))
    arguments = parser.parse_args()
    if arguments.checkpoint:
        model = build()
        model.load_state_dict(torch.load(arguments.checkpoint)["model"])
        tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint.parent)
    else:
        model, tokenizer = kvfold.bundled_model()
    scores = {}
    for trial in TRIALS:
        results = list(evaluate(model.eval(), tokenizer, trial, arguments.samples))
        name = f"{trial.task}@{trial.length}"
        right = sum(result.score for result in results)
        scores[name] = round(100 * right / len(results), 1)
        print(f"{name:18s} {scores[name]:5.1f}", flush=True)
    arguments.out.write_text(json.dumps({"samples": arguments.samples, "scores": scores}, indent=1))


if __name__ == "__main__":
    main()
