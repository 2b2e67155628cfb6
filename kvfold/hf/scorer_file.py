# SPDX-License-Identifier: Apache-2.0
"""Files of `kvfold fit`: fitted numbers, and the identity of the model that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.errors import ScorerFileError
from kvfold.hf.fitted_numbers import (
    CHECKSUM,
    FORMAT,
    HEADER,
    VERSION,
    Kind,
    ScorerHeader,
    how_to_fit,
    read_kind,
    read_scorer_file,
)
from kvfold.hf.header import (
    digest,
    digest_of,
    model_differences,
    order_metadata,
    rope_differences,
)
from kvfold.hf.identity import model_header, rope_header
from kvfold.methods.fitted import Fitted


def write_fitted(path: Path, fitted: Fitted, model: PreTrainedModel, **about: Any) -> None:
    """Writes what was fitted for `model`; `about` are further fields of the header.

    Equal fits give equal files. Raises OSError and SafetensorError if the file cannot be written.
    """
    rope, frequencies = rope_header(model)
    tensors = fitted.tensors | {f"rope.{name}": each for name, each in frequencies.items()}
    tensors = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    header = ScorerHeader(
        dtype=_dtype(model),
        model=model_header(model),
        rope=rope,
        checksums={name: digest_of(tensor) for name, tensor in tensors.items()},
        **about,
    )
    text = header.model_dump_json()
    about_file = {FORMAT: VERSION, HEADER: text, CHECKSUM: digest(VERSION + text)}
    save_file(tensors, path, about_file)
    order_metadata(path)


def read_fitted(path: str | Path, model: PreTrainedModel, kind: type[Kind]) -> Kind:
    """Fitted numbers of a file for `model`; a text table names no model, and is not compared.

    Raises ScorerFileError as `read_kind` does, and, naming what differs, if the file was fitted for
    another model, RoPE or dtype.
    """
    fitted, _ = read_kind(path, kind)
    reason = None
    if Path(path).suffix not in kind.tables:
        reason = difference(*read_scorer_file(path), model)
    if reason is not None:
        raise ScorerFileError(
            f"{path} was fitted for {reason}: fit one for this model, {how_to_fit(kind)}"
        )
    return fitted


def difference(
    header: ScorerHeader, tensors: dict[str, Tensor], model: PreTrainedModel
) -> str | None:
    """The difference of a file's model from `model`, in words; None if there is none."""
    if header.dtype != _dtype(model):
        return f"{header.dtype}, and the model computes in {_dtype(model)}"
    found = model_differences(model_header(model), header.model, weights=True)
    if found:
        return f"another model ({'; '.join(found)})"
    rope, frequencies = rope_header(model)
    theirs = {n.removeprefix("rope."): t for n, t in tensors.items() if n.startswith("rope.")}
    found = rope_differences(rope, header.rope, frequencies, theirs)
    return f"another RoPE ({'; '.join(found)})" if found else None


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
