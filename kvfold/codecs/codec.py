# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: "zstd", which loses nothing, "kivi4", and "kvtc:file=BASIS,ratio=16"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvfold.errors import KvfoldError

# Codecs without options.
Plain = Literal["zstd", "kivi4"]
PLAIN: tuple[Plain, ...] = ("zstd", "kivi4")


class Kvtc(BaseModel):
    """Transform coding of keys and values.

    Args:
        file: the model's basis, which `kvfold fit --codec kvtc` writes.
        ratio: bytes of coded keys and values in 16 bits a number, over those in the file.
        sinks: first tokens that stay whole.
        window: last tokens that stay whole (the paper's 128 take half of a 16th of 4096 tokens).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    ratio: Annotated[float, Field(ge=1, le=256)] = 16.0
    sinks: Annotated[int, Field(ge=0, le=2**20)] = 4
    window: Annotated[int, Field(ge=0, le=2**20)] = 16


def spelled(codec: Kvtc | Plain) -> str:
    """The text of a codec with every option."""
    if not isinstance(codec, Kvtc):
        return codec
    return "kvtc:" + ",".join(f"{name}={value}" for name, value in codec)


def codec_of(text: str) -> Kvtc | Plain:
    """The codec of a text. Raises KvfoldError for another one, or other options."""
    for plain in PLAIN:
        if text.removesuffix(":") == plain:
            return plain
    name, _, options = text.partition(":")
    if name != "kvtc":
        raise KvfoldError(
            f'there is no codec {text!r}: write "zstd", "kivi4" or "kvtc:file=BASIS,ratio=16"'
        )
    parts = [part.partition("=") for part in options.split(",") if part]
    try:
        return Kvtc.model_validate({key.strip(): value.strip() for key, _, value in parts})
    except ValidationError as problem:
        found = problem.errors()[0]
        where = ".".join(map(str, found["loc"])) or "it"
        raise KvfoldError(
            f"codec {text!r}: {where}: {found['msg'].lower()}; write kvtc:file=BASIS,ratio=16"
        ) from None
