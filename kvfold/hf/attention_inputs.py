# SPDX-License-Identifier: Apache-2.0
"""Hidden states that attention modules are given: behind the layer's input norm, before W_q."""

from __future__ import annotations

import threading
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

    Calls by other threads, which share the modules, are left alone. Raises UnsupportedModel for a
    layer without an attention module (None), and for a module that is called without hidden states.
    """
    # In a graph that another thread compiles meanwhile, a `local` is traced; `get_ident` is not.
    own = threading.local()
    own.note = note
    with ExitStack() as hooks:
        for place, module in enumerate(modules):
            if module is None:
                raise UnsupportedModel(
                    f"the model file names no attention module in layer {place}, whose input the "
                    "method reads: use another method"
                )
            hook = partial(_note, own, place)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _note(
    own: threading.local,
    place: int,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Hook that calls `own.note`, which only the thread that set it has.

    For another thread, which may find a hook half installed, torch leaves `kwargs` out.
    """
    note: Callable[[int, Tensor], None] | None = getattr(own, "note", None)
    if note is None:
        return
    hidden = (kwargs or {}).get("hidden_states", next(iter(args), None))
    if not isinstance(hidden, Tensor):
        raise UnsupportedModel(
            f"{type(module).__name__} is called without hidden states, which the method reads: use "
            "another method"
        )
    note(place, hidden)
