# SPDX-License-Identifier: Apache-2.0
"""The call by which transformers' `generate` makes the decode steps of a compileable cache."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import CompileConfig

from kvfold.hf.forward_hooks import preparing

Call = Callable[..., Any]  # in place of the model


class _Thread(threading.local):
    choose: Callable[[CompileConfig], Call] | None = None


_thread = _Thread()
_contexts: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # open ones


@contextmanager
def decode_steps_by(model: Any, choose: Callable[[CompileConfig], Call]) -> Iterator[None]:
    """Context in which this thread's `model.generate` makes decode steps by what `choose` returns.

    `generate` asks the model for a compiled forward (`get_compiled_call`); other threads get that.
    """
    with preparing:
        model.get_compiled_call = partial(_compiled_call, model)
        _contexts[model] = _contexts.get(model, 0) + 1
    before, _thread.choose = _thread.choose, choose
    try:
        yield
    finally:
        _thread.choose = before
        with preparing:
            _contexts[model] -= 1
            if not _contexts[model]:
                del model.get_compiled_call


def _compiled_call(model: Any, config: CompileConfig) -> Call:
    choose = _thread.choose
    return type(model).get_compiled_call(model, config) if choose is None else choose(config)
