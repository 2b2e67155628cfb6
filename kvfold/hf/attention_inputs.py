# SPDX-License-Identifier: Apache-2.0
"""Hidden states that attention modules are given: behind the layer's input norm, before W_q."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from kvfold.errors import UnsupportedModel


@contextmanager
def inputs_noted(
    modules: Sequence[nn.Module | None], note: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Calls `note` with the place of a module and its input `[B, S, Dm]`, before each of its calls.

    Raises UnsupportedModel for a layer without an attention module (None), and for a module that is
    called without hidden states.
    """
    with ExitStack() as hooks:
        for place, module in enumerate(modules):
            if module is None:
                raise UnsupportedModel(
                    f"the model file names no attention module in layer {place}, whose input the "
                    "method reads: use another method"
                )
            hook = partial(_note, partial(note, place))
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _note(
    note: Callable[[Tensor], None], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    hidden = kwargs.get("hidden_states", next(iter(args), None))
    if not isinstance(hidden, Tensor):
        raise UnsupportedModel(
            f"{type(module).__name__} is called without hidden states, which the method reads: use "
            "another method"
        )
    note(hidden)
