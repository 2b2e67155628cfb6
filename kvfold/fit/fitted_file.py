# SPDX-License-Identifier: Apache-2.0
"""The file of what was fitted, and its size beside the model's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import kvfold
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import REPLACE
from kvfold.hf.fitted_numbers import FORMAT, read_scorer_file
from kvfold.hf.header import digest
from kvfold.hf.scorer_file import difference, write_fitted
from kvfold.methods.fitted import Fitted
from kvfold.writing import check_kind, check_place, replacing


def weights_of(model: PreTrainedModel) -> int:
    """Numbers in the model's weights."""
    return sum(weight.numel() for weight in model.parameters())


def write_fit(
    path: Path,
    fitted: Fitted,
    model: PreTrainedModel,
    *,
    target: str,
    texts: Sequence[str],
    report: dict[str, Any],
    seed: int = 0,
) -> None:
    """Writes what was fitted to `target` on texts; `report` is what the fit measured."""
    request = request_of(fitted.method, target, texts, seed)
    about = {"target": target, "texts": len(texts), "report": report, "request": request}
    with replacing(path) as temporary:
        write_fitted(temporary, fitted, model, written_by=kvfold.__version__, **about)


def request_of(method: str, target: str, texts: Sequence[str], seed: int = 0) -> str:
    """Digest of a fit for `method` to `target`, without the model."""
    return digest(json.dumps([method, target, seed, list(texts)]))


def check_fit_place(path: Path) -> None:
    """Raises KvfoldError if no fit can be written at `path`, or another kind of file is there."""
    check_place(path)
    check_kind(path, FORMAT, "fitted file")


def check_fit(path: Path, request: str, model: PreTrainedModel | None = None) -> None:
    """Raises KvfoldError if the fit at `path` is of another request, or of another model.

    None: the model is not compared.
    """
    header, tensors = read_scorer_file(path)
    if header.request != request:
        raise KvfoldError(
            f"{path} is there already, fitted otherwise, to {header.target} on {header.texts} "
            f"texts (scorer, passages, words, seed or texts differ): {REPLACE}"
        )
    found = None if model is None else difference(header, tensors, model)
    if found is not None:
        raise KvfoldError(f"{path} is there already, fitted for {found}: {REPLACE}")
