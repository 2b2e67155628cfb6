# SPDX-License-Identifier: Apache-2.0
"""The binding of a cache to its model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.attention import handshake
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.adapters import Scales, active_adapters, parts_of
from kvfold.hf.attention import is_routed
from kvfold.hf.chat_template import PromptFrame
from kvfold.hf.identity import ReadBy, read_by
from kvfold.hf.image_spans import tokens_off_columns
from kvfold.hf.models import text_config
from kvfold.hf.rope_lengths import RopeLengths
from kvfold.hf.stock_layers import never_sliding_windows
from kvfold.methods.stages.when import Positions

UNMOVED = 'use another method, or positions="original"'


class KeysLost(UnsupportedModel):
    """Another attention than kvfold's took a layer's keys."""


class ModelBinding:
    """The model and tokenizer of a cache; it is `waiting` until the last layer has attended.

    `frame` is the chat template around its text; None: the tokenizer's own.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.modules = frozenset(id(module) for module in model.modules())
        self.name = type(model).__name__
        self.config = text_config(model)
        self.tokenizer = tokenizer
        self.frame: PromptFrame | None = None
        self.image_tokens = tokens_off_columns(model)
        self.rope, self._longest = RopeLengths.of(model), 0
        self.window = min(never_sliding_windows(model).values(), default=None)
        self.waiting = False
        self.read_by: ReadBy | None = None
        self.adapted = False  # by PEFT, which may switch adapters for a forward that has begun
        self.in_turn = False
        self._scales: Scales | None = None
        self._model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)

    def refusal(self) -> UnsupportedModel:
        """Error for a module of another model."""
        return UnsupportedModel(f"this cache was made for another model (a {self.name})")

    def asked(self, level: bool = True) -> None:
        """Called before the first layer of a forward hands out keys.

        Raises UnsupportedModel if another attention took the last keys or would take these, or if
        the layers are not `level`: they hold different numbers of tokens.
        """
        lost = self.config is not None and not is_routed(self.config)
        if self.waiting or lost or not level:
            self.check_answered(lost=True)
        self.waiting = True

    def check_forward(self, ids: Tensor | None, positions: Positions) -> None:
        """Raises as `check_model`, and as `check_images` where `positions` move keys."""
        generated = ids is not None and ids.shape[1] == 1  # no image, and no wait for a GPU
        self.check_model(step=generated or self.in_turn)
        if positions != "original" and not generated:
            self.check_images(ids, UNMOVED)

    def put_frame(self, frame: PromptFrame | None) -> None:
        """Takes the chat template around the text."""
        self.frame = frame

    def forget_reader(self) -> None:
        """Notes that the cache begins anew, which another model may read."""
        self.read_by = None

    def read_in(self, seen: int) -> int:
        """Columns of the longest text in which the first `seen` columns were read."""
        return max(seen, self._longest) if seen else 0

    def check_rope(self, seen: int, tokens_read: Callable[[], Tensor | None], new: int) -> None:
        """Raises as `RopeLengths.check` for `new` columns behind `seen`, or behind its tokens.

        Asked of a model whose RoPE changes with the length, alone.
        """
        assert self.rope is not None
        longest = self.read_in(seen)
        self.rope.check(seen, seen + new, longest)
        real = tokens_read()
        if real is not None:  # positions leave padding out, where the caller gives them
            tokens = int(real.sum(-1).max())
            self.rope.check(tokens, tokens + new, longest - seen + tokens)
        self._longest = max(longest, seen + new)

    def check_images(self, ids: Tensor | None, instead: str) -> None:
        """Raises UnsupportedModel if `ids [B, S]` hold an image that shifts later positions.

        None, the ids of embeddings, may hold one. `instead` is what the user should do.
        """
        if self.image_tokens and (
            ids is None or torch.isin(ids, torch.tensor(self.image_tokens, device=ids.device)).any()
        ):
            raise UnsupportedModel(
                f"{self.name} gives an image's tokens fewer positions than columns, and kvfold "
                f"moves keys by columns: {instead}"
            )

    @contextmanager
    def turn(self, seen: int) -> Iterator[None]:
        """A turn behind `seen` columns, whose forwards are checked as steps, and this as none.

        Raises as `check_model`; a cache that begins anew may be read by another model.
        """
        if seen:
            self.check_model()
        else:
            self.forget_reader()
        self.in_turn = True
        try:
            yield
        finally:
            self.in_turn = False

    def check_model(self, step: bool = False) -> None:
        """Notes what a cache's first forward or file is read by; KvfoldError under another later.

        In a `step` of a turn only names and scales of adapters are compared.
        """
        model = None if self._model is None else self._model()
        if model is None:
            return
        self.adapted = hasattr(model, "peft_config")
        if step and self.read_by is not None:
            names = active_adapters(model) if self.adapted else ()
            same = names == self.read_by.adapters.names
            if same and (self._scales is None or not self._scales.changed()):
                return
        parts = parts_of(model)
        now = read_by(parts, rope_is_fixed=self.rope is None)
        changed = None if self.read_by is None else self.read_by.change(now)
        if changed is not None:
            raise KvfoldError(
                f"this cache {changed}, which would read these entries wrongly: switch back, or "
                "make a new cache"
            )
        scales = Scales(parts.layers)
        self.read_by, self._scales = now, scales if scales.any else None

    def check_length(self, columns: int) -> None:
        """Raises KvfoldError if a text of `columns` makes windows slide that cover shorter ones."""
        if self.window is not None and columns > self.window:
            raise KvfoldError(
                f"the text would have {columns} tokens, and the layers of {self.name} slide from "
                f"{self.window} on, which is beyond the length it was trained for: shorten the text"
            )

    def check_answered(self, lost: bool = False) -> None:
        """Raises UnsupportedModel if another attention took a layer's keys, or they are `lost`."""
        if self.waiting or lost:
            handshake.forget()
            raise KeysLost(
                "this cache's keys did not come back to kvfold's attention: the last forward "
                "failed, kvfold.disable(model) was called, or another model used the cache; "
                "make a new cache"
            )

    def answered(self) -> None:
        """Notes that all layers' keys arrived in kvfold's attention."""
        self.waiting = False

    def __getstate__(self) -> dict[str, Any]:
        gone: dict[str, Any] = {
            "modules": frozenset(),
            "config": None,
            "waiting": False,
            "_scales": None,
            "_model": None,
        }
        return vars(self) | gone

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelBinding:
        other = object.__new__(ModelBinding)
        other.__dict__.update(self.__dict__)
        return other
