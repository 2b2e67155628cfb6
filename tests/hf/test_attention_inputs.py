# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention modules, noted for a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import kvfold
from kvfold import KvfoldError
from kvfold.hf.attention_inputs import inputs_noted
from kvfold.hf.models import attention_module
from tests.helpers.contexts import DOCUMENT, QUESTION, assert_same, new_model
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_input_is_behind_the_layers_norm(architecture):
    model = build(architecture, torch.float64)
    layers = range(model.config.num_hidden_layers)
    noted, given = {}, []
    norm = next(m for n, m in model.named_modules() if n.endswith(("input_layernorm", "ln_1")))
    norm.register_forward_hook(lambda module, args, out: given.append(out))
    modules = [attention_module(model, layer) for layer in layers]
    ids = torch.arange(3, 8)[None]
    with inputs_noted(modules, noted.__setitem__):
        model(ids)
    assert list(noted) == list(layers) and noted[0].shape[:2] == (1, 5)
    assert torch.equal(noted[0], given[0])
    noted.clear()
    model(ids)
    assert not noted


def test_layers_without_such_an_input_are_refused():
    module = nn.Linear(2, 2)
    refused = pytest.raises(KvfoldError, match="no attention module in layer 1")
    with refused, inputs_noted([module, None], print):
        pass
    assert not module._forward_pre_hooks
    with inputs_noted([module], print), pytest.raises(KvfoldError, match="without hidden states"):
        module(input=torch.ones(2))


def in_another_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, done by another thread; raises what it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as problem:
            found.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden)


def test_calls_of_other_threads_are_left_alone():
    block, noted = Block(), []
    with inputs_noted([block.attention], lambda place, hidden: noted.append(hidden)):
        block(torch.ones(2))
        in_another_thread(lambda: block(torch.zeros(2)))
        # Without hidden states, of which another thread's call knows nothing.
        in_another_thread(lambda: block.attention(input=torch.zeros(2)))
        hook = next(iter(block.attention._forward_pre_hooks.values()))
        # As torch calls a hook that is half installed, or half removed.
        in_another_thread(lambda: hook(block.attention, (torch.zeros(2),)))
    assert len(noted) == 1 and torch.equal(noted[0], torch.ones(2))


@pytest.mark.slow
def test_another_thread_may_compile_one_graph_meanwhile():
    block, noted = Block(), []
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    with inputs_noted([block.attention], lambda place, hidden: noted.append(hidden)):
        found = in_another_thread(lambda: compiled(torch.zeros(2)))
    assert torch.equal(found, block(torch.zeros(2))) and not noted


@contextmanager
def worked_amid_a_repetition(model: Any, work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Has another thread do `work` between a layer's input and its attention; lists its result."""
    attention, main, found = model.model.layers[1].self_attn, threading.get_ident(), []

    def between(*_: Any) -> None:
        repeating = bool(attention._forward_pre_hooks)
        if repeating and threading.get_ident() == main and not found:
            found.append(in_another_thread(work))

    handle = attention.q_proj.register_forward_pre_hook(between)
    yield found
    handle.remove()


def test_kvzip_plus_in_two_threads_keeps_what_each_keeps_alone():
    model, tokenizer = new_model(), word_tokenizer()
    drawn = torch.Generator().manual_seed(0)
    for layer in model.model.layers:  # inputs of many norms, and so other weights for each text
        layer.input_layernorm.weight.data.exponential_(generator=drawn)
    documents = DOCUMENT, " ".join(reversed(DOCUMENT.split()))
    first, second = (
        partial(kvfold.compress, model, tokenizer, document, "kvzip_plus", 40)
        for document in documents
    )
    alone = [first().cache, second().cache]
    with worked_amid_a_repetition(model, second) as meanwhile:
        together = first().cache
    assert_same(together, alone[0])
    assert_same(meanwhile[0].cache, alone[1])


def test_kvzip_plus_beside_a_chat_keeps_what_it_keeps_alone():
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "full")
    ask = partial(context.ask, QUESTION, max_new_tokens=4)
    alone, answer = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip_plus", 40), ask()
    with worked_amid_a_repetition(model, ask) as meanwhile:
        together = kvfold.compress(model, tokenizer, DOCUMENT, "kvzip_plus", 40)
    assert_same(together.cache, alone.cache)
    assert meanwhile == [answer]
