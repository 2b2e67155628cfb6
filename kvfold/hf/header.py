# SPDX-License-Identifier: Apache-2.0
"""Headers of files: the model that made them, and differences between two headers."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

ADAPTERS = "#"  # before the checksum of adapters, behind that of all weights and their names
CLOSE = 1e-5  # relative tolerance of RoPE frequencies
# Settings that older files do not name, so that there they are not compared.
ADDED: list[str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["added"]


class HeaderPart(BaseModel):
    """Part of a file's header."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelHeader(HeaderPart):
    """The model that read the document; compared by `model_differences`."""

    name: str
    config: dict[str, Any]
    config_hash: str
    weights: str
    vocabulary: str


class RopeHeader(HeaderPart):
    """RoPE of the stored keys; its frequencies are tensors of the file.

    `moved`: positions by which keys were rotated beyond their original positions.
    """

    parameters: dict[str, Any]
    scaling: dict[str, float]
    moved: int


def digest(text: str) -> str:
    """Checksum of a text: BLAKE2b, 16 bytes, hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of(tensor: Tensor) -> str:
    """Checksum of a CPU tensor's dtype, shape and bytes."""
    made = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)} ".encode(), digest_size=16)
    if tensor.numel():  # an empty tensor may have strides that no view takes
        made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()


def order_metadata(path: Path) -> None:
    """Puts the metadata of a safetensors file in order, in place: safetensors shuffles it.

    So equal content gives equal files.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size  # the same characters
        file.seek(8)
        file.write(text.ljust(size))


def model_differences(here: ModelHeader, there: ModelHeader, weights: bool) -> list[str]:
    """Differences between this model and the file's, in words; `weights` compares these, too."""
    found = differences(comparable(here.config, there.config), there.config)
    if here.name != there.name:
        found.insert(0, f"a {here.name} here, a {there.name} in the file")
    if not found and weights and here.weights != there.weights:
        found.append(f"the same configuration, but {_other_weights(here.weights, there.weights)}")
    if "" not in (here.vocabulary, there.vocabulary) and here.vocabulary != there.vocabulary:
        found.append("another vocabulary of the tokenizer")
    return found


def _other_weights(here: str, there: str) -> str:
    """The difference of two checksums of weights, and of adapters, in words."""
    if "+" in there and ADAPTERS not in there:
        return (
            "adapters whose weights and scales this older file does not name: compress again, or "
            "fit again"
        )
    names, _, checksum = there.rpartition(ADAPTERS)
    same = checksum and names == here.rpartition(ADAPTERS)[0]
    return "other weights or scales of its adapters" if same else "other weights"


def comparable(here: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """This model's settings without those of `ADDED` that the file's `there` does not name."""
    return {name: value for name, value in here.items() if name in there or name not in ADDED}


def rope_differences(
    here: RopeHeader, there: RopeHeader, mine: dict[str, Tensor], theirs: dict[str, Tensor]
) -> list[str]:
    """Differences between this model's RoPE and the file's, in words.

    `mine` and `theirs` are the frequencies by name.
    """
    found = differences(here.parameters, there.parameters)
    found += differences(here.scaling, there.scaling, " of the attention")
    same = mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape
        and torch.allclose(mine[name].cpu().float(), theirs[name].float(), rtol=CLOSE, atol=0)
        for name in mine
    )
    if not found and not same:
        found.append("other frequencies")
    if there.moved:
        found.append(f"keys moved by {there.moved} positions in the file")
    return found


def differences(here: dict[str, Any], there: dict[str, Any], of: str = "") -> list[str]:
    """Settings that differ, in words, with both values; `of` follows each name."""
    return [
        f"{name}{of} {here.get(name)!r} here, {there.get(name)!r} in the file"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
