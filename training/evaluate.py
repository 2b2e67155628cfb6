# SPDX-License-Identifier: Apache-2.0
"""Score the bundled model with its full cache: `python -m training.evaluate`.

With `--words`, a folder of RULER's word lists, also on keys without the words of the bundled lists.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import kvfold
from kvfold.eval.short_ruler_scores import RetrievalTrial, retrieval_scores
from kvfold.eval.tasks.vocabulary import BUNDLED, Vocabulary
from training.train import build

TRIALS = (
    RetrievalTrial("multikey", 512),
    *(RetrievalTrial(task, n) for n in (1024, 2048) for task in ("single", "multikey")),
    *(RetrievalTrial(task, n) for n in (1024, 2048) for task in ("multivalue", "multiquery", "vt")),
)


# Scored with keys of other words as well.
UNLISTED = (
    RetrievalTrial("single", 1024),
    RetrievalTrial("multikey", 1024),
    RetrievalTrial("multivalue", 1024),
)


def unlisted(folder: Path) -> Vocabulary:
    """The words in `folder` that the bundled lists do not have."""
    words, listed = Vocabulary.of(folder), {*BUNDLED.adjectives, *BUNDLED.nouns}

    def others(of: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word for word in of if word.isalpha() and word not in listed)

    return Vocabulary(others(words.adjectives), others(words.nouns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="score a training state instead")
    parser.add_argument("--words", type=Path, help="folder of RULER's word lists")
    parser.add_argument("--out", type=Path, default=Path("training/scores.json"))
    arguments = parser.parse_args()
    if arguments.checkpoint:
        model = build()
        model.load_state_dict(torch.load(arguments.checkpoint)["model"])
        tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint.parent)
    else:
        model, tokenizer = kvfold.bundled_model()
    runs = [(trial, BUNDLED, "") for trial in TRIALS]
    if arguments.words:
        runs += [(trial, unlisted(arguments.words), " other words") for trial in UNLISTED]
    scores = {}
    for trial, words, note in runs:
        results = list(
            retrieval_scores(model.eval(), tokenizer, trial, arguments.samples, vocabulary=words)
        )
        name = f"{trial.task}@{trial.length}{note}"
        right = sum(result.score for result in results)
        scores[name] = round(100 * right / len(results), 1)
        print(f"{name:28s} {scores[name]:5.1f}", flush=True)
    arguments.out.write_text(json.dumps({"samples": arguments.samples, "scores": scores}, indent=1))


if __name__ == "__main__":
    main()
