# SPDX-License-Identifier: Apache-2.0
"""`kvfold ask`: asks a compressed document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvfold.cli.console import console
from kvfold.cli.run import load


def command(
    model: Annotated[str, typer.Argument(help="The model that compressed the document.")],
    context: Annotated[Path, typer.Argument(help="A file written by `kvfold compress`.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; more draws the tokens.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
) -> None:
    """Ask a compressed document a question; the answer is shown as it comes."""
    out = console()
    with out.status("importing torch and transformers"):
        import kvfold
        from kvfold.files.format import read_header
    # Refused here, before a large model is loaded.
    read_header(context)
    network, tokenizer = load(model, among_ranks=True)
    held = kvfold.load(context, network, tokenizer)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    pieces = held.stream(question, max_new_tokens=max_new_tokens, stop=stop or (), **sampling)
    for piece in pieces:
        out.print(Text(piece), end="", soft_wrap=True)
    out.print()
