# SPDX-License-Identifier: Apache-2.0
"""Flat records for tables: one column per field."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


def flat(model: BaseModel | None, kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Fields of `model`, of type `kind`, with nested names joined by dots ("cell.subject.name").

    The keys depend on `kind` only; all values are None if `model` is. Dictionaries and tuples
    (`scores`, `by`, `errors`, …) become plain dicts and lists.
    """
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        value = None if model is None else getattr(model, name)
        fields = _with_fields(field.annotation)
        if fields is not None:
            found |= flat(value, fields, f"{prefix}{name}.")
        elif model is not None and isinstance(value, dict | tuple):
            found[prefix + name] = model.model_dump(mode="json", include={name})[name]
        else:
            found[prefix + name] = value
    return found


def _with_fields(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model of an annotation `M` or `M | None`; None for any other annotation."""
    several = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    for kind in (annotation, *several):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
