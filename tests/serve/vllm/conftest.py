# SPDX-License-Identifier: Apache-2.0
"""A folder of contexts as vLLM serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
from kvfold.serve.vllm.scheduler import SchedulerSide
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.vllm import BLOCK

# Heads that keep different numbers of pages.
UNEVEN = (f"kvzip + pages:size={BLOCK}", 60)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint."""
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def meta_model(model: Any, folder: Path) -> MetaModel:
    return MetaModel(model.config, str(folder))


@pytest.fixture(scope="session")
def served_folder(
    model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> ServedFolder:
    """Contexts `even` of 40 entries, `other` of as many, and `uneven`."""
    path = tmp_path_factory.mktemp("contexts")
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path / "even.kvfold")
    kvfold.compress(model, tokenizer, DOCUMENT, "h2o", 40).save(path / "other.kvfold")
    kvfold.compress(model, tokenizer, DOCUMENT, *UNEVEN).save(path / "uneven.kvfold")
    return ServedFolder(path, Paged(BLOCK))


@pytest.fixture(scope="session")
def compatibility(served_folder: ServedFolder, meta_model: MetaModel) -> CompatibilityCheck:
    return CompatibilityCheck(served_folder, meta_model, "float32")


@pytest.fixture
def scheduler_side(served_folder: ServedFolder, compatibility: CompatibilityCheck) -> SchedulerSide:
    return SchedulerSide(served_folder, compatibility, None, BLOCK)
