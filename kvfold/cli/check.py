# SPDX-License-Identifier: Apache-2.0
"""`kvfold check`: distance of methods to the full cache on one's own prompts, and certificates.

The address of an endpoint is checked by `check_engine.py`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvfold.cli import check_engine, options
from kvfold.cli.bench import words
from kvfold.cli.console import progress
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart, check_own
from kvfold.loading import Loading, check_name, load
from kvfold.terminal import messages, print_json
from kvfold.writing import check_folder, check_replaceable, write_text

if TYPE_CHECKING:
    from kvfold.checks.result import CheckResult

RESULT, PAGE = "check.json", "index.html"


@options.with_options(loading=options.loading)
def command(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help='A folder, a hub id, "bundled", or an address: http://HOST/v1.')
    ],
    prompts: Annotated[
        Path,
        typer.Argument(
            help="A .jsonl file, a .txt or .md file of one prompt, or a folder of them."
        ),
    ],
    methods: Annotated[
        str, typer.Option(help='"snapkv,kvzip,snapkv + kivi"; see `kvfold methods`.')
    ] = "snapkv,kvzip",
    budgets: Annotated[
        str, typer.Option(help="Budgets of the table; the certificate's is searched for.")
    ] = "0.5,0.2",
    question_aware: options.QuestionAware = False,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the full cache's answer that are forced.")
    ] = 64,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="Largest mean KL of a certificate, in nats per token; of an address, largest "
            "share of other first tokens.",
        ),
    ] = 0.05,
    error: Annotated[
        float, typer.Option(help="Most probable error of a bound: 0.1 gives 90 % confidence.")
    ] = 0.1,
    reference: Annotated[
        str | None,
        typer.Option(help="What an address is compared with: a model, or another address."),
    ] = None,
    attacks: Annotated[
        Path | None,
        typer.Option(
            help="Text file of requests for the system text, one a line.",
            show_default="one request",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the two halves and of random methods.")] = 0,
    out: Annotated[
        Path, options.out_option(file_okay=False, help="Folder of results; a rerun resumes.")
    ] = Path("kvfold-check"),
    force: options.Force = False,
    allow_longer: options.AllowLonger = False,
    as_json: options.Json = False,
    *,
    loading: Loading,
) -> None:
    """Compare methods with the full cache on your own prompts, without labels.

    Each method gets a certificate, the smallest kept part that stays within the tolerance on
    held-out prompts, or is refused one; and a bound of its loss with a stated confidence. Exit code
    0: all methods are certified; 1: one is not; 2: the input is wrong.

    An OpenAI-compatible endpoint's address is compared with a --reference by first tokens; keys are
    read from OPENAI_API_KEY, and REFERENCE_API_KEY for a reference at another host.
    """
    if model.lower().startswith(check_engine.SCHEMES):
        why = "an address is another engine's, with a cache of its own"
        options.refuse_given(ctx, check_engine.OF_METHODS, why)
        check_engine.check_address(
            model,
            reference,
            prompts,
            tolerance=tolerance,
            error=error,
            out=out,
            force=force,
            allow_longer=allow_longer,
            as_json=as_json,
            loading=loading,
        )
        return
    if reference is not None:
        raise KvfoldError("a model is compared with its own full cache: leave out --reference")
    screen = messages(as_json)
    with screen.status("importing torch and transformers"):
        from kvfold.checks.check import ATTACK, check, contenders, limits_of, several
        from kvfold.checks.earlier import check_request, check_subject, earlier_result
        from kvfold.checks.prompts import prompts_of
        from kvfold.checks.records import RECORDS
        from kvfold.methods.registry import listed
    # Refused here, before a large model is loaded.
    named, amounts = listed(methods), words(budgets)
    asked = contenders(named, amounts, question_aware)
    limits_of(tolerance, error)
    check_apart([out, *(out / made for made in (RECORDS, RESULT, PAGE))], [prompts, attacks])
    check_folder(out)
    check_replaceable(out / RESULT)
    check_own(out / PAGE)
    earlier = earlier_result(out / RESULT, force)
    if earlier is not None:
        check_request(
            out / RESULT,
            earlier,
            asked,
            tokens=tokens,
            question_aware=question_aware,
            seed=seed,
            tolerance=tolerance,
            error=error,
        )
    given = prompts_of(prompts)
    several(given)
    lines = [ATTACK] if attacks is None else options.read_text(attacks).splitlines()
    requests = [each for each in lines if each.strip()]
    check_name(model, loading)
    network, tokenizer = load(model, loading)
    if earlier is not None:
        check_subject(out / RESULT, earlier, network, tokenizer, given, requests)
    with progress(screen) as bar:
        task = bar.add_task("reading prompts", total=None)
        result = check(
            network,
            tokenizer,
            prompts,
            named,
            amounts,
            question_aware=question_aware,
            tokens=tokens,
            tolerance=tolerance,
            error=error,
            attacks=requests,
            seed=seed,
            allow_longer=allow_longer,
            out=out,
            say=lambda what: bar.update(task, description=what),
        )
    _show(screen, result, out, as_json, model)
    if not result.certified:
        raise typer.Exit(1)


def _show(screen: Console, result: CheckResult, out: Path, as_json: bool, model: str) -> None:
    """Writes the result and its page; prints tables, or the result as JSON."""
    from kvfold.checks.page import page, smallest
    from kvfold.cli.check_tables import bound_said, cells_table, spans_table, verdict

    write_text(out / RESULT, result.model_dump_json(indent=1) + "\n")
    write_text(out / PAGE, page(result))
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    screen.print(cells_table(result))
    if any(each.spans for each in result.cells):
        screen.print(spans_table(result))
    for each in result.certificates:
        style = "green" if each.certified else "yellow"
        screen.print(Text(verdict(each), style=style), soft_wrap=True)
    for bound in result.bounds:
        style = "green" if bound.confirmed else "yellow"
        screen.print(Text(bound_said(bound, result.limits), style=style), soft_wrap=True)
    for note in result.notes:
        screen.print(Text(note, style="dim"), soft_wrap=True)
    screen.print(Text(f"page: {(out / PAGE).resolve()}\nresult: {(out / RESULT).resolve()}"))
    best = smallest(result)
    if best is not None:
        aware = result.protocol.question_aware
        words = ["kvfold", "run" if aware else "compress", model, *(["--file"] if aware else [])]
        budget = [] if best.budget is None else ["--budget", best.budget]
        used = shlex.join([*words, "TEXT", "--method", best.method, *budget])
        screen.print(Text(f"next: {used}"), soft_wrap=True)
