# SPDX-License-Identifier: Apache-2.0
"""Refusals of fields that a request may not have, or not so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

PART_TYPE = re.compile(r"messages\.\d+\.content\.\d+\.type")
SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# What the server does not have, by field.
ABSENT = {field: absent for absent, fields in SAID["absent"].items() for field in fields}


def refusal_of(place: str | None, error: Any) -> str:
    """The words for one of pydantic's errors, about the field at a dotted `place`."""
    kind, values = error["type"], error.get("ctx", {})
    if (absent := absent_at(place)) is not None:
        return f"{absent}: leave the field out"
    said: str = SAID["words"].get(kind, SAID["other_kind"])
    if place is None and kind in SAID["of_bodies"]:
        said = SAID["of_bodies"][kind]
    elif place == "budget" and kind == "less_than_equal":
        said = SAID["no_ratio"]
    elif place == "prompt" and kind == "too_long":
        said = SAID["one_prompt"]
    elif place in SAID["instead"] and kind == "extra_forbidden":
        said = f"kvfold serve does not know this field: {SAID['instead'][place]}"
    elif kind == "literal_error" and PART_TYPE.fullmatch(place or ""):
        said = SAID["parts"]
    return said.format(**values)


def absent_at(place: str | None) -> str | None:
    """The words for a field at a dotted place, or in a message, that the server does not have."""
    parts = (place or "").split(".")
    field = parts[2] if parts[0] == "messages" and len(parts) > 2 else parts[0]
    return ABSENT.get(field)
