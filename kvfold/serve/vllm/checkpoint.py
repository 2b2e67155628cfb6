# SPDX-License-Identifier: Apache-2.0
"""Checksum of a checkpoint's weights, without loading the model."""

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

from kvfold.errors import UnsupportedModel
from kvfold.hf.identity import checksum

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weights(model: PreTrainedModel, folder: str | None, dtype: str) -> str:
    """The checksum of a checkpoint loaded as `dtype`, as in `ModelPart.weights`.

    `model` gives the names and the order of the weights; it may be on the meta device. Raises
    UnsupportedModel if the checkpoint stores them under other names, or not as safetensors.
    """
    return checksum(_read(model, _files(folder), getattr(torch, dtype)))


def _read(
    model: PreTrainedModel, files: dict[str, Path], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights, cast as on loading."""
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
    """The file of each weight, in a folder or in the local copy of a hub model."""
    try:
        folder = Path(name or "")
        if name and not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / INDEX).exists():
            places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {weight: folder / file for weight, file in places.items()}
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    except (OSError, ValueError, SafetensorError, HfHubHTTPError, LocalEntryNotFoundError) as why:
        raise UnsupportedModel(
            f"cannot read the weights of {name} from safetensors, so kvfold cannot tell whether a "
            f"context was made with them: {why}"
        ) from why
