# SPDX-License-Identifier: Apache-2.0
"""`kvfold inspect`: a model's attention and the tokens each method keeps, as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvfold.cli import options
from kvfold.cli.console import progress
from kvfold.errors import KvfoldError
from kvfold.loading import Loading, load
from kvfold.terminal import console
from kvfold.writing import check_folder, make_folder, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvfold.budget import Budget
    from kvfold.inspect.attention_maps import LayerAttention
    from kvfold.inspect.inspected_text import InspectedText
    from kvfold.inspect.retention import Retention

FOLDER = "kvfold-inspect"
PAGE = "index.html"
PICTURES = ("attention.png", "variance.png", "lazy.png", "norms.png", "kept.png")


@options.with_options(loading=options.loading)
def command(
    place: options.ModelPlace = None,
    named: options.ModelOption = None,
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas.")
    ] = "snapkv,pyramidkv,kvzip,d2o",
    budget: Annotated[str, typer.Option(help=options.BUDGET_HELP)] = "0.2",
    prompt: options.TextOption = None,
    file: options.TextFile = None,
    encoding: options.Encoding = "utf-8",
    out: Annotated[
        Path | None,
        options.out_option(
            file_okay=False, help="Folder to write to.", show_default=f"a new {FOLDER}"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the generated text and of random methods.")
    ] = 0,
    allow_longer: options.AllowLonger = False,
    *,
    loading: Loading,
) -> None:
    """Inspect a model: attention heatmaps, variance, lazy layers, tokens kept by each method."""
    model, text = options.model_of(place, named), options.text_of(prompt, file, encoding)
    screen = console()
    with screen.status("importing torch and transformers"):
        import kvfold
        from kvfold.cli.inspect_tables import explained, layers_table, methods_table
        from kvfold.generation.length import check_length
        from kvfold.hf.models import trained_length
        from kvfold.inspect.inspected_text import LENGTH, InspectedText
    # Refused here, before a large model is loaded.
    compared, limit = names(methods), kvfold.Budget.of(budget)
    for each in compared:
        options.checked(each, budget if kvfold.parse(each).takes_budget else None)
    folder = _folder(out)
    network, tokenizer = load(model, loading)
    _check(network, tokenizer, compared, limit)
    if text is None:
        most = trained_length(network) or LENGTH
        document = InspectedText.with_needles(tokenizer, min(LENGTH, most // 2), seed)
    else:
        document = InspectedText.of(tokenizer, text)
        check_length(network, document.ids.shape[1], allow_longer)
    make_folder(folder)
    layers, retentions = _measure(screen, network, tokenizer, document, compared, limit, seed)
    screen.print(layers_table(layers))
    screen.print(Text(explained(layers), style="dim"), end="\n\n")
    screen.print(methods_table(document, retentions))
    title = "bundled model" if model == "bundled" else model
    _write(folder, title, document, layers, retentions)
    screen.print(Text(f"Open {(folder / PAGE).resolve()}", overflow="fold"))
    screen.print(Text(f"Pictures beside it: {', '.join(PICTURES)}", overflow="fold"))


def names(text: str) -> list[str]:
    """The distinct methods in `text`; raises KvfoldError for none."""
    from kvfold.methods.registry import listed

    found = listed(text)
    if not found:
        raise KvfoldError("no methods: write for example --methods snapkv,kvzip")
    return list(dict.fromkeys(found))


def _folder(out: Path | None) -> Path:
    """The folder to write to; raises KvfoldError if it holds a page or picture already."""
    if out is None:
        out = next(each for each in map(_numbered, count(1)) if not os.path.lexists(each))
    check_folder(out)
    taken = [name for name in (PAGE, *PICTURES) if os.path.lexists(out / name)]
    if taken:
        raise KvfoldError(f"{out} already holds {taken[0]}: choose another folder with --out")
    return out


def _numbered(number: int) -> Path:
    return Path(FOLDER if number == 1 else f"{FOLDER}-{number}")


def _check(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, named: list[str], limit: Budget
) -> None:
    """Raises KvfoldError now for methods and budgets that a cache would refuse later."""
    import kvfold

    for each in named:
        own = limit if kvfold.parse(each).takes_budget else None
        kvfold.CompressedCache(model, each, own, tokenizer=tokenizer)


def _measure(
    screen: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: InspectedText,
    named: list[str],
    limit: Budget,
    seed: int,
) -> tuple[list[LayerAttention], list[Retention]]:
    """Attention per layer, and kept entries per method: one reading each, with a progress bar."""
    from kvfold.hf.stock_layers import is_compressible, stock_layers
    from kvfold.inspect.attention_maps import watch_attention
    from kvfold.inspect.retention import measure_retention

    own = sum(map(is_compressible, stock_layers(model)))
    with progress(screen) as bar:
        tokens = f"{document.ids.shape[1]:,} tokens"
        task = bar.add_task(f"attention of {own} layers over {tokens}", total=own + len(named))
        advance: Callable[[], None] = lambda: bar.advance(task)  # noqa: E731
        layers = watch_attention(model, document.ids.to(model.device), advance)
        retentions = []
        for each in named:
            bar.update(task, description=f"{each} compresses {tokens}")
            try:
                retentions.append(measure_retention(model, tokenizer, document, each, limit, seed))
            except KvfoldError as refused:
                raise KvfoldError(f"{each}: {refused}") from refused
            advance()
    return layers, retentions


def _write(
    folder: Path,
    title: str,
    document: InspectedText,
    layers: Sequence[LayerAttention],
    retentions: Sequence[Retention],
) -> None:
    from kvfold.evidence.pictures import save
    from kvfold.inspect import pictures
    from kvfold.inspect.page import page

    indices = [layer.index for layer in layers]
    figures: tuple[Figure, ...] = (
        pictures.attention_figure(layers),
        pictures.variance_figure(layers),
        pictures.lazy_figure(layers),
        pictures.norm_figure(layers),
        pictures.kept_maps_figure(document, indices, retentions),
    )
    for name, figure in zip(PICTURES, figures, strict=True):
        save(figure, folder / name)
    write_text(folder / PAGE, page(title, document, layers, retentions))
