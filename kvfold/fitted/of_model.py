# SPDX-License-Identifier: Apache-2.0
"""Files of `kvfold fit` with the model that they are for: written, read, and compared with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.errors import KvfoldError, ScorerFileError
from kvfold.evidence.outputs import REPLACE
from kvfold.fitted.file import (
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
from kvfold.fitted.numbers import Fitted
from kvfold.hf.header import digest, digest_of, model_differences, order_metadata, rope_differences
from kvfold.hf.identity import model_header, rope_header
from kvfold.writing import check_kind, check_place, replacing


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


def weights_of(model: PreTrainedModel) -> int:
    """Numbers in the model's weights."""
    return sum(weight.numel() for weight in model.parameters())


F = TypeVar("F", bound="Fit")


@dataclass(frozen=True)
class Fit:
    """A fit: its file, and the number of `texts` that it was fitted on.

    `numbers` is its size, `share` that as part of the model's weights.
    """

    path: Path
    texts: int
    numbers: int
    share: float

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        raise NotImplementedError

    @classmethod
    def written(
        cls: Callable[..., F],
        path: str | Path,
        fitted: Fitted,
        model: PreTrainedModel,
        texts: Sequence[str],
        target: str,
        measured: Mapping[str, Any],
        also: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> F:
        """The fit to `target`, written to its file with what was `measured`.

        `also` are fields of the fit that its file has not, or otherwise.
        """
        about = {"target": target, "texts": len(texts), "report": {**measured}}
        request = request_of(fitted.method, target, texts, seed)
        with replacing(path := Path(path)) as temporary:
            version = kvfold.__version__
            write_fitted(temporary, fitted, model, written_by=version, **about, request=request)
        share = fitted.numbers / weights_of(model)
        return cls(path, len(texts), fitted.numbers, share, **{**measured, **(also or {})})


def request_of(method: str, target: str, texts: Sequence[str], seed: int = 0) -> str:
    """Digest of a fit for `method` to `target`, without the model."""
    return digest(json.dumps([method, target, seed, list(texts)]))


def check_fit_place(path: Path) -> None:
    """Raises KvfoldError if no fit can be written at `path`, or another kind of file is there."""
    check_place(path)
    check_kind(path, FORMAT, "fitted file")


def check_fit(path: Path, request: str, model: PreTrainedModel | None = None) -> None:
    """Raises KvfoldError if the fit at `path` is of another request, or of another model.

    None: the model is not compared.
    """
    header, tensors = read_scorer_file(path)
    if header.request != request:
        raise KvfoldError(
            f"{path} is there already, fitted otherwise, to {header.target} on {header.texts} "
            f"texts (scorer, passages, words, seed or texts differ): {REPLACE}"
        )
    found = None if model is None else difference(header, tensors, model)
    if found is not None:
        raise KvfoldError(f"{path} is there already, fitted for {found}: {REPLACE}")
