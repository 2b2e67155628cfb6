# SPDX-License-Identifier: Apache-2.0
"""W_o, the projection of a layer's attention output, as the model file applies it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import LayerOfModel
from kvfold.kernels.projected_norms import gram, l1_norms, l2_norms
from kvfold.observers.stored import OutputNorm

# Gram matrices [Hq, Dv, Dv] by projection, with the state of the weight that they were made of
_grams: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], Tensor]] = (
    weakref.WeakKeyDictionary()
)


class OutputProjection(LayerOfModel):
    """W_o of one layer."""

    def check(self) -> None:
        """Raises UnsupportedModel if the weight cannot be read, or is not all that is applied.

        Examples are a gate or a norm before it, an adapter, and a quantized weight.
        """
        self._weight(self._module())

    def norms(self, values: Tensor, kind: OutputNorm, query_heads: int) -> Tensor:
        """Norms `[B, Hq, T]`, float32, of `values [B, H, T, Dv]` that each query head projects."""
        module = self._module()
        weight = self._weight(module)
        if weight.shape[1] != query_heads * values.shape[3]:
            raise self._unknown("is not one of its query heads")
        by_head = weight.unflatten(1, (query_heads, -1)).transpose(0, 1)  # [Hq, Dm, Dv]
        if kind == "l1":
            return l1_norms(values, by_head)
        # Another one after each change of the weight.
        state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        known = _grams.get(module)
        if known is None or known[0] != state:
            known = _grams[module] = state, gram(by_head)
        return l2_norms(values, known[1])

    def _module(self) -> nn.Module:
        attention = self.attention
        name = None if attention is None else _applied_to_output(type(attention).forward)
        if name is None:
            raise self._unknown("does not directly follow attention in the model file")
        found: nn.Module = getattr(attention, name)
        return found

    def _weight(self, module: nn.Module) -> Tensor:
        """The weight `[Dm, Hq·Dv]`; under tensor parallelism its columns for this rank's heads."""
        if type(module) not in (nn.Linear, Conv1D):
            raise self._unknown(f"is a {type(module).__name__}")
        given: Any = module.weight
        weight: Tensor = (given.to_local() if hasattr(given, "to_local") else given).detach()
        plain = type(weight) is Tensor and weight.is_floating_point() and weight.element_size() > 1
        if not plain or weight.is_meta:
            raise self._unknown("has a weight that is quantized, or kept elsewhere")
        return weight.T if isinstance(module, Conv1D) else weight

    def _unknown(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"the output projection of layer {self.layer} {why}, so that kvfold cannot tell the "
            "norms of projected values: load the model whole and unquantized, merge its adapters, "
            "or use another method"
        )


@functools.cache
def _applied_to_output(forward: Callable[..., Any]) -> str | None:
    """Name of the module that `forward` applies to its attention's output; None: not known.

    The model file must say just `x = x.reshape(…)` and `y = self.NAME(x)` after the attention call.
    """
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    function = ast.parse(textwrap.dedent(source)).body[0]
    statements = function.body if isinstance(function, ast.FunctionDef) else []
    calls = [
        i for i, each in enumerate(statements) if "= attention_interface(" in ast.unparse(each)
    ]
    following = statements[calls[-1] + 1 : calls[-1] + 3] if calls else []
    if len(following) < 2:
        return None
    output = _reshaped(following[0])
    if output is None or f"{output}, " not in ast.unparse(statements[calls[-1]]):
        return None
    return _projecting(following[1], output)


def _reshaped(statement: ast.stmt) -> str | None:
    """The name x of `x = x.reshape(…)`, or of `x = x.view(…).contiguous()`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "contiguous":
                call = call.func.value if isinstance(call.func.value, ast.Call) else call
            match call.func:
                case ast.Attribute(value=ast.Name(id=own), attr="reshape" | "view") if own == name:
                    return name
    return None


def _projecting(statement: ast.stmt, output: str) -> str | None:
    """The NAME of `y = self.NAME(x)`, where x is `output`."""
    match statement:
        case ast.Assign(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=name),
                args=[ast.Name(id=given)],
                keywords=[],
            )
        ) if given == output:
            return name
    return None
