# SPDX-License-Identifier: Apache-2.0
"""Transform coding of keys and values (KVTC): principal directions, one step, entropy coding.

Coefficients of all directions are rounded to multiples of one step, which spends bits where the
variance is: a direction below the step costs nothing. The step is found for each context, so that
its file has the size that was asked for.
Source: Staniszewski and Łańcucki (arXiv 2511.01815), who choose bits by dynamic programming and
scale each token; metrics and the coding of small symbols are kvfold's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codecs import symbols
from kvfold.codecs.basis import Codes, Scope, Transform
from kvfold.codecs.symbols import CodedStreams
from kvfold.errors import CodecRefusal

KEYS_SHARE = 1 / 3  # of the bytes: values take the rest, as their errors cost more
ROUNDS = 12  # halvings of the logarithm of the step's range
NUDGE = 1.005  # of a step whose streams are a little larger than expected
FINEST, COARSEST = 2.0**-14, 2.0**6  # steps, in standard deviations of the largest coefficient


@dataclass(frozen=True)
class CodedSide:
    """Coded keys or values: `streams` in steps of `step`."""

    streams: CodedStreams
    step: float


def encode(
    heads: Sequence[Tensor], transform: Transform, scope: Scope, nbytes: float
) -> CodedSide | None:
    """Codes keys or values `[n, D]` of each KV head in at most `nbytes`; None if that is too few.

    Raises CodecRefusal for numbers that are not finite.
    """
    coefficients = transform.forward(heads, scope)
    filled = [each for each in coefficients if each.numel()]
    deviation = max((float(each.square().mean(-1).max()) for each in filled), default=1.0) ** 0.5
    peak = max((float(each.abs().max()) for each in filled), default=0.0)
    if not math.isfinite(deviation + peak):
        raise CodecRefusal('keys or values are not finite: save the context with codec="zstd"')

    def at(step: float) -> list[Tensor]:
        return [stream for each in coefficients for stream in (each / step).round()]

    # A symbol is at most MOST.
    fine = max(FINEST * (deviation or 1.0), peak / symbols.MOST)
    coarse = max(COARSEST * (deviation or 1.0), fine)
    step = _finest_fitting(lambda step: symbols.expected_bytes(at(step)) <= nbytes, fine, coarse)
    while step is not None:
        made = CodedSide(symbols.encode(at(step)), step)
        if made.streams.nbytes <= nbytes:
            return made
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
    coded: CodedSide, transform: Transform, scope: Scope, counts: Sequence[int]
) -> list[Tensor]:
    """Keys or values `[n, D]` of each KV head, float32; `counts` are the heads' entries.

    Raises ContextFileError for streams that do not fit these entries.
    """
    shapes = transform.streams(counts, scope)
    lengths = [columns for streams, columns in shapes for _ in range(streams)]
    found, first, blocks = dict(symbols.decode(coded.streams, lengths)), 0, list[Codes]()
    for streams, columns in shapes:
        rows = [row for row in range(streams) if first + row in found]
        codes = [found.pop(first + row) for row in rows]
        blocks.append(
            Codes(rows, torch.stack(codes) if rows else torch.zeros(0, columns, dtype=torch.int16))
        )
        first += streams
    return transform.back(blocks, coded.step, scope)
