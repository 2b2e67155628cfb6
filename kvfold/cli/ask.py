# SPDX-License-Identifier: Apache-2.0
"""`kvfold ask`: a question to a compressed document."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import options
from kvfold.cli.console import stats_json
from kvfold.cli.run import show
from kvfold.errors import KvfoldError
from kvfold.loading import Loading, load
from kvfold.terminal import console, messages, print_json


@options.with_options(loading=options.loading, sampling=options.sampling)
def command(
    model: Annotated[str, typer.Argument(help="The model that compressed the document.")],
    context: Annotated[Path, typer.Argument(help="A file written by `kvfold compress`.")],
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="The question; - is standard input.", show_default=False
        ),
    ] = None,
    encoding: options.Encoding = "utf-8",
    max_new_tokens: options.MaxNewTokens = 64,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    special_tokens: options.SpecialTokens = False,
    allow_longer: options.AllowLonger = False,
    template: options.TemplateArguments = None,
    as_json: options.Json = False,
    *,
    loading: Loading,
    sampling: options.SamplingOptions,
) -> None:
    """Ask a compressed document a question; the answer is streamed."""
    asked = _asked(model, question, encoding)
    with messages(as_json).status("importing torch and transformers"):
        import kvfold
        from kvfold.contexts.files.read import check_method
    # Refused here, before a large model is loaded.
    check_method(context)
    network, tokenizer = load(model, loading, among_ranks=True)
    held = kvfold.load(context, network, tokenizer)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop or ()}
    how |= {"special_tokens": special_tokens, "allow_longer": allow_longer}
    how |= sampling.options() | {"template": options.template_arguments(template)}
    if as_json:
        print_json({"answer": held.ask(asked, **how), "stats": stats_json(held.stats())})
        return
    out = console()
    for piece in held.stream(asked, **how):
        show(out, piece)
    out.print()


def _asked(model: str, question: str | None, encoding: str) -> str:
    """The question; raises KvfoldError where the model is missing, or is not the first argument."""
    if Path(model).suffix == ".kvfold":
        from kvfold.contexts.files.format import read_header

        raise KvfoldError(
            f"{model} was made by a {read_header(model).model.name} and does not say where that "
            f"lies: name it first, kvfold ask MODEL {shlex.quote(model)} QUESTION"
        )
    if question is None:
        raise KvfoldError("there is no question: kvfold ask MODEL FILE QUESTION")
    return options.read_text(Path(question), encoding) if question == "-" else question
