# SPDX-License-Identifier: Apache-2.0
"""Transform coding of keys and values (KVTC): principal directions, one step, entropy coding.

Coefficients of all directions, of keys and of values, are rounded to multiples of one step, which
spends bits where the variance is: a direction below the step costs nothing. The step is found for
each context, so that its file has the size that was asked for.
Source: Staniszewski and Łańcucki (arXiv 2511.01815), who choose bits by dynamic programming and
scale each token; weights of channels and the coding of small symbols are kvfold's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codecs import symbols
from kvfold.codecs.basis import Codes, Scope, Transform
from kvfold.codecs.symbols import CodedStreams
from kvfold.errors import KvfoldError

ROUNDS = 12  # halvings of the logarithm of the step's range
NUDGE = 1.005  # of a step whose streams are a little larger than expected
FINEST, COARSEST = 2.0**-14, 2.0**6  # steps, in standard deviations of the largest coefficient


class Coded(NamedTuple):
    """Streams of each of the coded sides, in steps of `step`."""

    streams: list[CodedStreams]
    step: float


def encode(
    sides: Sequence[tuple[Sequence[Tensor], Transform]], scope: Scope, nbytes: float
) -> Coded | None:
    """Codes keys, and values, `[n, D]` of each KV head in `nbytes` at most; None if these are few.

    Raises KvfoldError for numbers that are not finite.
    """
    coefficients = [transform.forward(heads, scope) for heads, transform in sides]
    filled = [each for side in coefficients for each in side if each.numel()]
    deviation = max((float(each.square().mean(-1).max()) for each in filled), default=1.0) ** 0.5
    peak = max((float(each.abs().max()) for each in filled), default=0.0)
    if not math.isfinite(deviation + peak):
        raise KvfoldError('keys or values are not finite: save the context with codec="zstd"')

    def at(step: float) -> list[list[Tensor]]:
        return [[one for each in side for one in (each / step).round()] for side in coefficients]

    def expected(step: float) -> float:
        return sum(map(symbols.expected_bytes, at(step)))

    # A symbol is at most MOST.
    fine = max(FINEST * (deviation or 1.0), peak / symbols.MOST)
    coarse = max(COARSEST * (deviation or 1.0), fine)
    step = _finest_fitting(lambda step: expected(step) <= nbytes, fine, coarse)
    while step is not None:
        made = list(map(symbols.encode, at(step)))
        if sum(streams.nbytes for streams in made) <= nbytes:
            return Coded(made, step)
        step = NUDGE * step if step < coarse else None
    return None


def _finest_fitting(fits: Callable[[float], bool], fine: float, coarse: float) -> float | None:
    """The finest step, within the search's precision, whose streams fit; None if none does."""
    if fits(fine):
        return fine
    if not fits(coarse):
        return None
    for _ in range(ROUNDS):
        middle = (fine * coarse) ** 0.5
        if fits(middle):
            coarse = middle
        else:
            fine = middle
    return coarse


def decode(
    coded: CodedStreams,
    step: float,
    transform: Transform,
    scope: Scope,
    counts: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Keys or values `[n, D]` of each KV head, float32; `counts` are the heads' entries.

    Products of a joint basis are in bfloat16 if that is `dtype`, the model's, else float32. Raises
    ContextFileError for streams that do not fit these entries.
    """
    shapes = transform.streams(counts, scope)
    lengths = [columns for streams, columns in shapes for _ in range(streams)]
    found, first, blocks = dict(symbols.decode(coded, lengths)), 0, list[Codes]()
    for streams, columns in shapes:
        rows = [row for row in range(streams) if first + row in found]
        codes = [found.pop(first + row) for row in rows]
        blocks.append(Codes(rows, torch.stack(codes) if rows else torch.zeros(0, columns)))
        first += streams
    short = scope == "joint" and dtype == torch.bfloat16
    return transform.back(blocks, step, scope, torch.bfloat16 if short else torch.float32)
