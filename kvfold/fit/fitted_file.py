# SPDX-License-Identifier: Apache-2.0
"""The file of what was fitted, and its size beside the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import kvfold
from kvfold.hf.scorer_file import write_fitted
from kvfold.methods.fitted import Fitted
from kvfold.writing import replacing


def weights_of(model: PreTrainedModel) -> int:
    """Numbers in the model's weights."""
    return sum(weight.numel() for weight in model.parameters())


def write_fit(
    path: Path,
    fitted: Fitted,
    model: PreTrainedModel,
    *,
    target: str,
    texts: int,
    report: dict[str, Any],
) -> None:
    """Writes what was fitted to `target` on so many texts; `report` is what the fit measured."""
    about = {"target": target, "texts": texts, "report": report}
    with replacing(path) as temporary:
        write_fitted(temporary, fitted, model, written_by=kvfold.__version__, **about)
