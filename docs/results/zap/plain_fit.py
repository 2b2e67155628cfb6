# SPDX-License-Identifier: Apache-2.0
"""A scorer fitted without generated records.

`python -m docs.results.zap.plain_fit MODEL OUT.safetensors TEXT.md ...`

Passages of the same texts, number and length as `make fits` draws, as they stand in the texts.
docs/results/zap/plain holds what this scorer finds on the leaderboard's tasks:
`kvfold eval --methods zap:file=OUT.safetensors ...`, as in `real_leaderboard.sh`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

import kvfold
from kvfold.fitted.fitting import passages
from kvfold.loading import Loading, load

PASSAGES, WORDS, TARGET = 24, 400, "kvzip:score=rms"


def main(
    model: Annotated[str, typer.Argument(help="Hub id or folder.")],
    out: Annotated[Path, typer.Argument(help="The scorer's file.")],
    texts: Annotated[list[Path], typer.Argument(help="Texts to draw passages from.")],
) -> None:
    network, tokenizer = load(model, Loading())
    contents = [path.read_text("utf-8") for path in texts]
    with patch.object(passages, "_with_records", lambda passage, draw: passage):
        plain = passages.drawn(contents, PASSAGES, WORDS, seed=0)
    kvfold.fit_scorer(network, tokenizer, plain, out, target=TARGET, note=typer.echo)


if __name__ == "__main__":
    typer.run(main)
