# SPDX-License-Identifier: Apache-2.0
"""Layers of context files that are loaded in part: some heads alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import ContextFileError
from kvfold.contexts.files import format as files_format
from kvfold.contexts.files.format import read_header
from tests.helpers.contexts import KIVI, TURBO, compressed


@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, TURBO, "think", "minicache"])
def test_some_heads_are_loaded_alone(model, tokenizer, tmp_path, spec):
    context = compressed(model, tokenizer, spec)
    context.save(tmp_path / "a.kvfold")
    for head in range(2):
        part = kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(head, head + 1))
        for own, whole in zip(part.cache.states, context.cache.states, strict=True):
            length = own.stored().length
            for mine, all_heads in zip(own.stored().dense(), whole.stored().dense(), strict=True):
                assert torch.equal(mine[0, 0], all_heads[0, head, -length:])
            kept = own.columns()[0, 0]
            every = whole.columns()[0, head, -length:]
            assert torch.equal(kept, every)


def test_some_heads_read_only_their_tensors(model, tokenizer, saved, monkeypatch):
    read = []
    whole = files_format.ContextFile.tensor

    def noted(self: Any, name: str) -> Tensor:
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(files_format.ContextFile, "tensor", noted)
    kvfold.load(saved, model, tokenizer, heads=slice(1, 2))
    of_heads = {name.rpartition(".")[2] for name in read if name.startswith("layers.")}
    assert of_heads == {"1", "capacity"}
    read.clear()
    read_header(saved)
    assert read == []


def test_heads_that_are_not_there_are_refused(model, tokenizer, saved):
    with pytest.raises(ContextFileError, match="2 heads, none in"):
        kvfold.load(saved, model, tokenizer, heads=slice(2, 4))
