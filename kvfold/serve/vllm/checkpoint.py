# SPDX-License-Identifier: Apache-2.0
"""The weights of a model's folder, told apart without loading the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.contexts.files.identity import checksum
from kvfold.errors import UnsupportedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weights(model: PreTrainedModel, folder: str | None, dtype: str) -> str:
    """The checksum that `ModelPart.weights` holds, of a checkpoint that is loaded as `dtype`.

    `model` says which weights there are, and in which order. Raises UnsupportedModel where the
    checkpoint does not hold them under the model's own names, or holds no safetensors.
    """
    return checksum(_read(model, _files(folder), getattr(torch, dtype)))


def _read(
    model: PreTrainedModel, files: dict[str, Path], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each weight as it would be loaded."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, _ in model.named_parameters():
            path = files.get(name)
            if path is None:
                raise UnsupportedModel(
                    f"the checkpoint has no weight {name}: where weights are stored under other "
                    "names than the model's (mixtures of experts are), kvfold cannot tell whether "
                    "a context was made with them; use kvfold's own server"
                )
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield name, opened[path].get_tensor(name).to(dtype)


def _files(name: str | None) -> dict[str, Path]:
    """In which file of a folder, or of a hub's id that was downloaded, each weight is."""
    try:
        folder = Path(name or "")
        if name and not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / INDEX).exists():
            places = json.loads((folder / INDEX).read_text())["weight_map"]
            return {weight: folder / file for weight, file in places.items()}
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    except (OSError, ValueError, SafetensorError, HfHubHTTPError, LocalEntryNotFoundError) as why:
        raise UnsupportedModel(
            f"cannot read the weights of {name} from safetensors, so kvfold cannot tell whether a "
            f"context was made with them: {why}"
        ) from why
