# SPDX-License-Identifier: Apache-2.0
"""The small trained model that comes with kvfold; `training/` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

FOLDER = Path(__file__).parent


def bundled_model(**options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled model and its tokenizer, without network; in float32 unless `options` differ.

    `options` are those of `from_pretrained`, for the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    options = {"dtype": torch.float32} | options
    model = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, **options)
    return model.eval(), tokenizer
