# SPDX-License-Identifier: Apache-2.0
"""RoPE as the model file applies it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import LayerOfModel, text_config
from kvfold.hf.rope_lengths import rope_settings


def rope_of(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, float]]:
    """RoPE of a model: the configuration's settings, frequencies, and attention factors.

    Frequencies that change with the text's length are those of its beginning.
    """
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    frequencies: dict[str, Tensor] = {}
    scaling: dict[str, float] = {}
    for place, module in model.get_decoder().named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            kind = name.removesuffix("inv_freq")
            if kind == name or kind.endswith("original_"):
                continue
            original = buffers.get(f"{kind}original_inv_freq")
            frequencies[f"{place}.{name}"] = buffer if original is None else original
            scaling[f"{place}.{name}"] = float(getattr(module, f"{kind}attention_scaling", 1.0))
    return dict(parameters), frequencies, scaling


def rope_types(config: Any) -> set[str | None]:
    """RoPE types ("default", "yarn", …) of all types of layers."""
    return {kind.get("rope_type") for kind in rope_settings(config)}


ROTATION = "apply_rotary_pos_emb("  # the call in a model file
OF_ROPE = re.compile(r"rotary|\brope|rope\b|_rope|rope_|freqs|\bsin\b|\bcos\b")


@cache
def _lines_of(forward: Callable[..., Any]) -> list[str]:
    """Source lines of a model file's function."""
    return inspect.getsource(forward).splitlines()


class Rotation(LayerOfModel):
    """Moves keys by a number of positions with the model file's own rotary function."""

    def check(self, instead: str = 'use positions="original"') -> None:
        """Raises UnsupportedModel if rotating stored keys by a constant would be wrong.

        `instead` is what the user should do.
        """
        name = type(self.model).__name__
        if self._has_changing_frequencies():
            raise UnsupportedModel(
                f"{name} changes its rotary frequencies with the length, so kept keys cannot be "
                f"moved: {instead}"
            )
        if not self._is_known():
            raise UnsupportedModel(
                f"layer {self.layer} of {name} has no rotary keys that could be moved for "
                f"certain: {instead}"
            )

    def check_reversible(self) -> None:
        """Raises UnsupportedModel if stored keys cannot be rotated back for certain.

        Keys of models that rotate nothing, and of layers without RoPE, do not change.
        """
        reason = self.irreversible()
        if reason is not None:
            raise UnsupportedModel(
                f"{reason}, so there are no un-rotated keys or queries to read: use another "
                "method, or model"
            )

    def irreversible(self) -> str | None:
        """Why stored keys cannot be rotated back for certain; None if they can."""
        name = type(self.model).__name__
        if self._has_changing_frequencies():
            return f"{name} changes its rotary frequencies with the length"
        if self._has_positions_of_images():
            return f"{name} rotates keys of images by positions that kvfold does not see"
        if not (self._is_known() or self._has_no_rope()):
            return f"kvfold cannot tell how layer {self.layer} of {name} rotates its keys"
        return None

    @property
    def turns(self) -> bool:
        """True if the layer rotates its keys."""
        return self._embedding() is not None and getattr(self.attention, "use_rope", True)

    def __call__(self, keys: Tensor, shift: Tensor) -> Tensor:
        """Keys `[B, H, n, D]` rotated forward by `shift` positions.

        `shift` is `[B]`, `[B, n]` or `[B, H, n]`.
        """
        if not self.turns:
            return keys
        if shift.dim() == 1:
            shift = shift.view(-1, 1).expand(-1, keys.shape[2])
        if shift.dim() == 2:
            return self._turned(keys, shift)
        # Angles differ between heads: each head is a row of its own.
        return self._turned(keys.flatten(0, 1)[:, None], shift.flatten(0, 1)).view(keys.shape)

    def _turned(self, keys: Tensor, at: Tensor) -> Tensor:
        """Keys `[B, H, n, D]` rotated forward by `at [B, n]` positions."""
        embedding, apply = self._embedding(), self._apply()
        assert embedding is not None and apply is not None
        kinds = getattr(text_config(self.model), "layer_types", None)
        takes_kind = "layer_type" in inspect.signature(embedding.forward).parameters
        kind = {"layer_type": kinds[self.layer]} if kinds and takes_kind else {}
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        # Over several GPUs the embedding is on one of them.
        cos, sin = (each.to(keys.device) for each in embedding(wide, at, **kind))
        # YaRN's attention factor is already inside the stored key.
        prefix = f"{kind['layer_type']}_" if kind else ""
        factor = getattr(embedding, f"{prefix}attention_scaling", 1.0)
        cos, sin = cos / factor, sin / factor
        size = 2 * getattr(embedding, f"{prefix}inv_freq").shape[-1]
        turning, still = wide[..., :size], wide[..., size:]
        if "k" in inspect.signature(apply).parameters:
            turned = apply(turning[:, :1], turning, cos, sin)[1]  # of queries nothing is needed
        else:
            turned = apply(turning, cos, sin, unsqueeze_dim=1)
        whole = torch.cat([turned, still], -1) if still.shape[-1] else turned
        return whole.to(keys.dtype)

    def _has_changing_frequencies(self) -> bool:
        """True if frequencies depend on the text's length."""
        return bool({"dynamic", "longrope"} & rope_types(text_config(self.model)))

    def _has_positions_of_images(self) -> bool:
        """True if an image's tokens have other positions than their number in the row."""
        model = self.model
        reads_images = text_config(model) is not model.config
        return reads_images and hasattr(self._embedding(), "mrope_section")

    def _has_no_rope(self) -> bool:
        """True if the model file rotates nothing at all (GPT-2)."""
        module = self.attention
        if module is None or self._embedding() is not None or self._apply() is not None:
            return False
        return not OF_ROPE.search(inspect.getsource(type(module)).lower())

    def _is_known(self) -> bool:
        """True if the model file rotates all keys in a way that kvfold can repeat."""
        known = self._embedding() is not None and self._apply() is not None
        if hasattr(text_config(self.model), "kv_lora_rank") or not known:
            return False
        return not (self._is_conditional() or self._changes_rotated_keys())

    def _is_conditional(self) -> bool:
        """True if the model file rotates under a condition that kvfold cannot read from it."""
        module = self.attention
        if module is None or hasattr(module, "use_rope"):
            return module is None
        calls = [line for line in _lines_of(type(module).forward) if ROTATION in line]
        outermost = " " * 8
        return not calls or any(line.startswith(outermost + " ") for line in calls)

    def _changes_rotated_keys(self) -> bool:
        """True if the model file norms keys after their rotation, with a weight per channel."""
        module = self.attention
        lines = [] if module is None else _lines_of(type(module).forward)
        calls = [i for i, line in enumerate(lines) if ROTATION in line]
        after = lines[calls[-1] + 1 :] if calls else []
        return any(line.strip().startswith("key_states = self.") for line in after)

    def _embedding(self) -> nn.Module | None:
        return getattr(self.model.get_decoder(), "rotary_emb", None)

    def _apply(self) -> Callable[..., Any] | None:
        module = sys.modules[type(self.model.get_decoder()).__module__]
        return getattr(module, "apply_rotary_pos_emb", None)
