# SPDX-License-Identifier: Apache-2.0
"""`kvfold check URL`: another engine's endpoint against a reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError
from rich.text import Text

from kvfold.cli.console import progress
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import REPLACE, check_apart, check_own
from kvfold.evidence.tables import table
from kvfold.loading import Loading, check_name, load
from kvfold.terminal import messages, print_json
from kvfold.writing import check_folder, check_replaceable, make_folder, write_text

if TYPE_CHECKING:
    from kvfold.checks.engines.questions import ChatQuestion
    from kvfold.checks.engines.reference import EndpointReference, LocalReference
    from kvfold.checks.engines.result import CheckedEndpoint, EngineCheckResult
    from kvfold.eval.run.cell import EvaluatedModel

RESULT, PAGE = "check.json", "index.html"
MARK = b'"kvfold check of an engine"'
SCHEMES = ("http://", "https://")
# Parameters of the command that are about caches of this process.
OF_METHODS = ("methods", "budgets", "question_aware", "tokens", "attacks", "seed")


def check_address(
    address: str,
    reference: str | None,
    prompts: Path,
    *,
    tolerance: float,
    error: float,
    out: Path,
    force: bool,
    allow_longer: bool,
    as_json: bool,
    loading: Loading,
) -> None:
    """Compares the endpoint at an address with a reference; exit code 1 without a certificate.

    Raises KvfoldError for wrong input, before a prompt is sent where that shows it.
    """
    if reference is None:
        raise KvfoldError(
            f"{address.partition('#')[0]} is compared with a reference: give --reference MODEL, or "
            "the address of another endpoint"
        )
    screen = messages(as_json)
    with screen.status("importing torch and transformers"):
        from kvfold.checks.engines.check import agreement_limits, check_engine, described
        from kvfold.checks.engines.client import Endpoint, key_of, split_address
        from kvfold.checks.engines.questions import check_number, digest_of, questions_of
        from kvfold.checks.prompts import prompts_of
    split_address(address)
    limits = agreement_limits(tolerance, error)
    check_apart([out, out / RESULT, out / PAGE], [prompts])
    check_folder(out)
    check_replaceable(out / RESULT)
    check_own(out / PAGE)
    earlier = _earlier(out / RESULT, force)
    questions = questions_of(prompts_of(prompts))
    check_number(questions, limits)
    endpoint = Endpoint.of(address, key_of(address), questions[0].messages)
    known, subject = _reference(reference, address, questions, loading, allow_longer)
    request = described(endpoint), subject, limits, digest_of(questions)
    if earlier is not None and _request(earlier) != request:
        raise KvfoldError(f"{out / RESULT} is there already, of another check: {REPLACE}")
    with progress(screen) as bar:
        task = bar.add_task("asking", total=None)
        result = check_engine(
            endpoint,
            known,
            subject,
            questions,
            limits,
            say=lambda what: bar.update(task, description=what),
        )
    _show(result, out, as_json)
    if not result.certified:
        raise typer.Exit(1)


def _reference(
    reference: str,
    address: str,
    questions: list[ChatQuestion],
    loading: Loading,
    allow_longer: bool,
) -> tuple[EndpointReference | LocalReference, CheckedEndpoint | EvaluatedModel]:
    """The reference and its description: another endpoint, or a model that is loaded here."""
    from kvfold.checks.check import subject_of
    from kvfold.checks.engines.check import described
    from kvfold.checks.engines.client import Endpoint, key_of
    from kvfold.checks.engines.reference import EndpointReference, LocalReference

    if reference.lower().startswith(SCHEMES):
        made = Endpoint.of(reference, key_of(reference, address), questions[0].messages)
        return EndpointReference(made), described(made)
    check_name(reference, loading)
    network, tokenizer = load(reference, loading)
    return LocalReference(network, tokenizer, allow_longer), subject_of(network, tokenizer)


def _earlier(path: Path, force: bool) -> EngineCheckResult | None:
    """The result at `path`; None without one, and for one to replace by `force`."""
    from kvfold.checks.engines.result import EngineCheckResult

    if not path.is_file() or not (text := path.read_bytes()):
        return None
    if MARK not in text:
        raise KvfoldError(f"{path} is no result of a check of an engine: choose another --out")
    if force:
        return None
    try:
        return EngineCheckResult.model_validate_json(text)
    except ValidationError:
        raise KvfoldError(
            f"{path} is there already, of another version of kvfold: {REPLACE}"
        ) from None


def _request(result: EngineCheckResult) -> tuple[object, ...]:
    return result.endpoint, result.reference, result.limits, result.prompts_digest


def _show(result: EngineCheckResult, out: Path, as_json: bool) -> None:
    """Writes the result and its page; prints a table, or the result as JSON."""
    from kvfold.checks.engines.page import COLUMNS, name_of, page, rows, verdict

    make_folder(out)
    write_text(out / RESULT, result.model_dump_json(indent=1) + "\n")
    write_text(out / PAGE, page(result))
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    screen = messages(as_json)
    title = f"{result.prompts} prompts, the first token after each"
    screen.print(table(title, *COLUMNS, right=COLUMNS[1:], rows=rows(result)))
    screen.print(Text(f"endpoint: {name_of(result.endpoint)}"), soft_wrap=True)
    screen.print(Text(f"reference: {name_of(result.reference)}"), soft_wrap=True)
    style = "green" if result.certified else "yellow"
    screen.print(Text(verdict(result), style=style), soft_wrap=True)
    for note in result.notes:
        screen.print(Text(note, style="dim"), soft_wrap=True)
    screen.print(Text(f"page: {(out / PAGE).resolve()}\nresult: {(out / RESULT).resolve()}"))
