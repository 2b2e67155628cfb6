# SPDX-License-Identifier: Apache-2.0
"""`kvfold fit`: fits on texts what methods of one model read, or a codec of its context files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli import options
from kvfold.cli.console import progress
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart
from kvfold.evidence.tables import table
from kvfold.loading import Loading, load
from kvfold.terminal import console, messages, print_json
from kvfold.writing import has_content

if TYPE_CHECKING:
    from kvfold.fitted.fitting.kinds import OtherFit
    from kvfold.fitted.fitting.scorer import FitResult

WORDS = 740  # about a thousand tokens of English


@options.with_options(loading=options.loading)
def command(
    ctx: typer.Context,
    model: options.ModelName,
    texts: Annotated[list[Path], typer.Argument(help="Text files; - is standard input.")],
    scorer: Annotated[
        str,
        typer.Option(
            help="Method whose scores zap learns, kvzip or kvzip_plus; qfilter; triattention; duo; "
            'or curve, with another method in front: "snapkv + curve".'
        ),
    ] = "kvzip",
    codec: Annotated[
        str | None, typer.Option(help="kvtc: the basis of a codec of context files, no scorer.")
    ] = None,
    out: Annotated[
        Path | None,
        options.out_option(
            help="What is written; by default scorer.safetensors, or the fitted method's name."
        ),
    ] = None,
    passages: Annotated[
        int,
        typer.Option(
            min=4, help="Passages to read; some are held out where a fit is tested on them."
        ),
    ] = 32,
    words: Annotated[int, typer.Option(min=50, help="Words of a passage.")] = WORDS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a fit that was stopped.")
    ] = False,
    force: options.Force = False,
    seed: Annotated[
        int, typer.Option(help="Of passages and projections.", callback=options.checked_seed)
    ] = 0,
    encoding: options.Encoding = "utf-8",
    as_json: options.Json = False,
    *,
    loading: Loading,
) -> None:
    """Fit on your own model what zap, qfilter, triattention, duo, curve or a codec read."""
    notes = messages(as_json)
    with notes.status("importing torch and transformers"):
        from kvfold.fitted.fitting.kinds import method_and_target, other_fit
        from kvfold.fitted.fitting.passages import drawn, too_short, without_passage
        from kvfold.fitted.fitting.scorer import FitResult, fit_scorer
        from kvfold.fitted.of_model import check_fit, check_fit_place, request_of
        from kvfold.methods.registry import with_known_names
    # Refused here, before a large model is loaded.
    fit: Callable[..., FitResult | OtherFit]
    if codec not in (None, "kvtc"):
        raise KvfoldError(f"kvtc is the codec that is fitted, not {codec}")
    if codec is not None:
        options.refuse_given(ctx, ["scorer"], "--codec fits a codec and no scorer")
    scorer = codec or with_known_names(scorer)
    other = other_fit(scorer)
    method, target = method_and_target(scorer)
    if other is not None:
        if resume:
            raise KvfoldError(f"{scorer} is fitted in one go: leave --resume out")
        fit = other
    else:
        fit = partial(fit_scorer, target=scorer, seed=seed, resume=resume)
    out = out or Path(f"{'scorer' if other is None else method}.safetensors")
    check_apart([out], texts)
    check_fit_place(out)
    if len([path for path in texts if str(path) == "-"]) > 1:
        raise KvfoldError("standard input is read once: name one -")
    whole = [options.read_text(path, encoding) for path in texts]
    read = drawn(whole, passages, words, seed)
    there = not force and has_content(out)
    request = request_of(method, target, read, seed if other is None else 0)
    if there:
        check_fit(out, request)
    for place in too_short(whole, words):
        told = f"{texts[place]} has fewer than {words} words (--words), and is not used"
        notes.print(told, soft_wrap=True)
    if unread := len(without_passage(whole, passages, words)):
        told = f"{unread} of {len(texts)} texts give no passage: raise --passages ({passages})"
        notes.print(told, soft_wrap=True)
    network, tokenizer = load(model, loading)
    if there:
        check_fit(out, request, network)
    with progress(notes) as bar:
        task = bar.add_task("fitting", total=None)
        result = fit(
            network, tokenizer, read, out, note=lambda line: bar.update(task, description=line)
        )
    if as_json:
        print_json(asdict(result))
    elif isinstance(result, FitResult):
        _print(result)
    else:
        _print_other(result, method)


def _print_other(result: OtherFit, method: str) -> None:
    out = console()
    out.print(f"{result.report}; {result.numbers:,} numbers from {result.texts} passages")
    _say_use(result.path, method, "codec" if method == "kvtc" else "method")


def _say_use(path: Path, method: str, option: str = "method") -> None:
    """Prints the option that names the file, as a shell takes it."""
    given = shlex.quote(f"{method}:file={path}")
    console().print(f"{path}: use it as --{option} {given}", soft_wrap=True)


def _print(result: FitResult) -> None:
    held = result.held_out
    shown = table(
        f"held-out passages of {result.texts}", "kept", "overlap", "mass", right=["overlap", "mass"]
    )
    for part in held.overlap:
        shown.add_row(f"{part:.0%}", f"{held.overlap[part]:.1%}", f"{held.mass[part]:.1%}")
    out = console()
    out.print(shown)
    out.print(f"squared error {held.loss:.2f}, of heads' means {held.loss_of_means:.2f}")
    out.print(
        f"{result.numbers:,} numbers, {result.share:.2%} of the weights; {result.projections} "
        f"projections, penalty {result.penalty:g}"
    )
    _say_use(result.path, "zap")
