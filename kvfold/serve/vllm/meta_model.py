# SPDX-License-Identifier: Apache-2.0
"""The served model without its weights: configuration, layers and RoPE, on the meta device."""

from __future__ import annotations

import copy
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfold.contexts.files.format import ContextFile
from kvfold.errors import ContextFileError, KvfoldError, UnsupportedModel
from kvfold.hf.header import comparable, differences, digest
from kvfold.hf.identity import checksum, computation, rope_header
from kvfold.hf.models import shares_entries, text_config
from kvfold.hf.rotation import Rotation
from kvfold.hf.stock_layers import is_compressible, never_sliding_windows, stock_layers
from kvfold.policies import Rope


class MetaModel:
    """A model on the meta device, built from its configuration; rotary frequencies are real.

    `folder` is the checkpoint's, or a hub id. Raises UnsupportedModel if keys cannot be moved by a
    constant angle (dynamic NTK, longrope, latents (MLA), conditional RoPE, no RoPE), and if some
    layer does not attend to its whole past.
    """

    def __init__(self, config: Any, folder: str | None) -> None:
        self.folder = folder
        self._digests: dict[str, str] = {}
        try:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        except ValueError as problem:
            raise UnsupportedModel(f"kvfold does not know this model: {problem}") from problem
        self.name = type(self.model).__name__
        self.config = text_config(self.model)
        self._restore_frequencies()
        self._check_layers()
        self.rotations = [self._rotation(layer) for layer in range(self.layers)]

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def rope(self) -> Rope | None:
        """The layers' RoPE by its frequencies; None: it is of another kind."""
        frequencies = getattr(self.model.get_decoder().rotary_emb, "inv_freq", None)
        if frequencies is None:
            return None
        rope = Rope(frequencies.float())
        probe, by = torch.randn(1, 1, 4, 2 * len(frequencies)), torch.tensor([7])
        turned, wanted = rope(probe, by), self.rotations[0](probe, by)
        return rope if torch.allclose(turned, wanted, rtol=1e-5, atol=1e-5) else None

    def identity(self, dtype: str) -> str:
        """A text that differs for another configuration, and for other weights in `dtype`."""
        config = json.dumps(computation(self.config), sort_keys=True)
        return f"{self.name} {config} {self._weights(dtype)}"

    def check(self, file: ContextFile) -> None:
        """Raises ContextFileError, naming the differences to the model that made the file."""
        found = self._differences(file)
        if found:
            raise ContextFileError(f"{file.path} was made with another model: {'; '.join(found)}")
        if sorted(part.index for part in file.header.layers) != list(range(self.layers)):
            raise ContextFileError(
                f"{file.path} holds {len(file.header.layers)} layers, and the model has "
                f"{self.layers}"
            )
        file.check_rope(*rope_header(self.model))

    def move(self, layer: int, keys: Tensor, by: int) -> Tensor:
        """Keys `[H, T, D]` of a layer rotated by `by` positions (negative: back), in float32."""
        moved: Tensor = self.rotations[layer](keys.float()[None], torch.tensor([by]))[0]
        return moved

    def _differences(self, file: ContextFile) -> list[str]:
        there = file.header.model
        here = comparable(computation(self.config), there.config)
        found = differences(here, there.config)
        if not found and digest(json.dumps(here, sort_keys=True)) != there.config_hash:
            found.append("another hash of the configuration")
        if self.name != there.name:
            found.insert(0, f"a {self.name} here, a {there.name} in the file")
        if not found and self._weights(file.header.dtype) != there.weights:
            found.append("the same configuration, but other weights")
        return found

    def _weights(self, dtype: str) -> str:
        """The checksum of the checkpoint's weights; computed once per dtype."""
        if dtype not in self._digests:
            self._digests[dtype] = weights(self.model, self.folder, dtype)
        return self._digests[dtype]

    def _restore_frequencies(self) -> None:
        """Replaces the rotary embedding's meta tensors by real frequencies."""
        decoder = self.model.get_decoder()
        embedding = getattr(decoder, "rotary_emb", None)
        if embedding is not None:
            with torch.device("cpu"):
                decoder.rotary_emb = type(embedding)(self.config)

    def _check_layers(self) -> None:
        own = [is_compressible(layer) for layer in stock_layers(self.model)]
        plain = all(own) and not never_sliding_windows(self.model)
        if not plain or len(own) != self.layers or shares_entries(self.model):
            raise UnsupportedModel(
                f"{self.name} has layers with a window, or that hold something else than the keys "
                "and values of all tokens, or share them: vLLM lays these out apart, which kvfold "
                "does not fill"
            )

    def _rotation(self, layer: int) -> Rotation:
        rotation = Rotation(self.model, layer)
        try:
            rotation.check()
        except KvfoldError as problem:
            raise UnsupportedModel(
                f"{self.name} cannot serve compressed contexts from vLLM, which numbers positions "
                "anew: the keys of its layers cannot be moved by a constant angle (dynamic NTK, "
                "longrope, latents, or no plain RoPE); use kvfold's own server"
            ) from problem
        return rotation


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
