# SPDX-License-Identifier: Apache-2.0
"""A model, its tokenizer, and a context file of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.contexts import KIVI, compressed, new_model
from tests.helpers.tokenizers import word_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def saved(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small context of a ragged, packed kind."""
    path = tmp_path_factory.mktemp("contexts") / "saved.kvfold"
    compressed(model, tokenizer, f"snapkv + {KIVI}").save(path)
    return path
