# SPDX-License-Identifier: Apache-2.0
"""Sums of an unfinished fit, stored beside the scorer's file, to resume from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from kvfold.errors import KvfoldError
from kvfold.fitted.fitting.features import Features, RidgeSums
from kvfold.hf.header import digest
from kvfold.hf.identity import model_header
from kvfold.reading import stable_path
from kvfold.writing import check_kind, check_replaceable, replacing


@dataclass(frozen=True)
class Progress:
    """Sums over the first `done` texts of a fit that `about` identifies, in the file `path`."""

    path: Path
    about: str
    done: int = 0
    features: Features | None = None
    sums: RidgeSums | None = None

    @classmethod
    def at(
        cls,
        out: Path,
        model: PreTrainedModel,
        target: str,
        seed: int,
        texts: Sequence[str],
        resume: bool,
    ) -> Progress:
        """The progress stored beside `out` if `resume`, else none.

        Raises KvfoldError if it is unreadable, or of another model, target, seed or texts.
        """
        path = out.with_name(f"{out.name}.partial")
        identity = [model_header(model).weights, str(model.dtype), target, seed, list(texts)]
        check_replaceable(path)
        if not resume:
            check_kind(path, "about", "stopped fit")
        blank = cls(path, digest(json.dumps(identity)))
        return blank._stored(len(texts)) if resume and path.exists() else blank

    def _stored(self, texts: int) -> Progress:
        try:
            with stable_path(self.path) as place, safe_open(place, framework="pt") as file:
                about = file.metadata() or {}
                names = ("scales", "projections", "gram", "cross")
                scales, projections, gram, cross = (file.get_tensor(name) for name in names)
        except (OSError, SafetensorError) as problem:
            raise self._unreadable(problem) from problem
        if about.get("about") != self.about:
            raise KvfoldError(
                f"{self.path} holds the sums of another fit (model, texts, target or seed differ): "
                "fit without resume"
            )
        try:
            done, count = int(about["done"]), int(about["count"])
        except (KeyError, ValueError) as problem:
            raise self._unreadable("its numbers are damaged") from problem
        models, size = scales.shape[:-1].numel(), sum(projections.shape)
        fits = gram.shape == (models, size, size) and cross.shape == (models, size)
        finite = bool(gram.isfinite().all()) and bool(cross.isfinite().all())
        if not (fits and finite and 0 < done <= texts and count > 0):
            raise self._unreadable("its sums are damaged")
        features, sums = Features(scales, projections), RidgeSums(gram, cross, count)
        return replace(self, done=done, features=features, sums=sums)

    def _unreadable(self, why: object) -> KvfoldError:
        return KvfoldError(f"cannot resume from {self.path} ({why}): fit without resume")

    def save(self, done: int, features: Features, sums: RidgeSums) -> None:
        """Stores the sums over the first `done` texts; raises KvfoldError if that fails."""
        tensors = vars(features) | {"gram": sums.gram, "cross": sums.cross}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        numbers = {"about": self.about, "done": str(done), "count": str(sums.count)}
        with replacing(self.path) as temporary:
            save_file(tensors, temporary, numbers)

    def remove(self) -> None:
        """Removes the file, once the fit is done."""
        self.path.unlink(missing_ok=True)
