# SPDX-License-Identifier: Apache-2.0
"""The result of an earlier check, which only its own request may replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.checks.batches import rows_of
from kvfold.checks.check import CheckInputs, limits_of, protocol_of, subject_of
from kvfold.checks.prompts import CheckPrompt
from kvfold.checks.result import CheckResult
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import REPLACE, check_made

MARK = b'"kvfold check"'


def earlier_result(path: Path, force: bool) -> CheckResult | None:
    """The result at `path`; None without a file or content, and for one to replace by `force`.

    Raises KvfoldError for another file, and for a result of another version without `force`.
    """
    if not path.is_file() or not (text := path.read_bytes()):
        return None
    if MARK not in text:
        raise KvfoldError(f"{path} is no result of `kvfold check`: choose another --out")
    if force:
        return None
    try:
        return CheckResult.model_validate_json(text)
    except ValidationError as problem:
        raise KvfoldError(
            f"{path} is there already, of another version of kvfold: {REPLACE}"
        ) from problem


def check_request(
    path: Path,
    earlier: CheckResult,
    asked: Mapping[str, Sequence[str | None]],
    *,
    tokens: int,
    question_aware: bool,
    seed: int,
    tolerance: float,
    error: float,
) -> None:
    """Raises KvfoldError if the result at `path` is of other methods, budgets or limits."""
    cells = [(method, budget) for method in asked for budget in asked[method]]
    protocol = protocol_of(tokens, question_aware, seed)
    of_cells = [(each.method, each.budget) for each in earlier.cells]
    check_made(path, "methods and budgets", _listed(of_cells), _listed(cells))
    limits = limits_of(tolerance, error)
    check_made(path, "tolerance", earlier.limits.mean_kl, limits.mean_kl)
    check_made(path, "error", earlier.limits.error, limits.error)
    for option in ("tokens", "question_aware", "seed"):
        check_made(path, option, getattr(earlier.protocol, option), getattr(protocol, option))


def check_subject(
    path: Path,
    earlier: CheckResult,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    given: list[CheckPrompt],
    attacks: Sequence[str],
) -> None:
    """Raises KvfoldError if the result at `path` is of another model, or of other prompts."""
    subject, protocol = subject_of(model, tokenizer), earlier.protocol
    how = protocol.question_aware, protocol.seed, rows_of(model)
    inputs = CheckInputs.of(tokenizer, given, attacks, *how)
    if earlier.subject != subject:
        raise KvfoldError(f"{path} is there already, of another model or its settings: {REPLACE}")
    if earlier.prompts_digest != inputs.digest:
        raise KvfoldError(f"{path} is there already, of other prompts or attacks: {REPLACE}")


def _listed(cells: Sequence[tuple[str, str | None]]) -> str:
    return ", ".join(method if budget is None else f"{method} {budget}" for method, budget in cells)
