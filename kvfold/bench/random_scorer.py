# SPDX-License-Identifier: Apache-2.0
"""A scorer of random weights for a random model, so that zap can be timed on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kvfold.bench.models import BenchModel
from kvfold.fitted.numbers import NO_FILE, FileName
from kvfold.fitted.of_model import write_fitted
from kvfold.methods.base import Method, parse
from kvfold.methods.stages.score.learned import Scorer
from kvfold.methods.zap import Zap
from kvfold.methods.zap_threshold import ZapThreshold

PROJECTIONS = 64  # a fit chooses none, 64 or 256


def runnable(method: str, subject: BenchModel, folder: Path) -> Method:
    """The method as it can run on the subject: zap without a file gets a random scorer.

    On models of random weights only, which nothing was fitted to. The file lies in `folder`.
    """
    parsed = parse(method)
    if subject.source.config is None or not isinstance(parsed, Zap | ZapThreshold):
        return parsed
    if parsed.file != NO_FILE:
        return parsed
    path = folder / "scorer.safetensors"
    write_fitted(path, scorer(subject), subject.model, written_by="", target="random", texts=0)
    return replace(parsed, file=FileName(path))


def scorer(subject: BenchModel) -> Scorer:
    """Random weights in the shape that a fit gives them, by the subject's seed."""
    shape, draw = subject.shape, torch.Generator().manual_seed(subject.source.seed)
    features = 2 * shape.head_size + 3
    sizes = (shape.layers, shape.kv_heads, features + PROJECTIONS)
    return Scorer(
        torch.randn(sizes, generator=draw),
        torch.ones(*sizes[:2], features),
        torch.randn(features, PROJECTIONS, generator=draw) / features**0.5,
    )
