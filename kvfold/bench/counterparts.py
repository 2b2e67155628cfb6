# SPDX-License-Identifier: Apache-2.0
"""Counterparts: the kvpress press, with its arguments, for each method of kvfold.

Source: NVIDIA/kvpress 0.5.5, `kvpress/presses/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvfold.bench.participants import FULL, ParticipantLabel
from kvfold.budget import Budget
from kvfold.methods.adakv import AdaKV
from kvfold.methods.base import Method, parse
from kvfold.methods.compactor import REMOVED, Compactor
from kvfold.methods.criticalkv import CriticalKV
from kvfold.methods.cur import CUR
from kvfold.methods.expected_attention import ExpectedAttention
from kvfold.methods.h2o import H2O
from kvfold.methods.keydiff import KeyDiff
from kvfold.methods.knorm import KNorm
from kvfold.methods.kvzip import KVzip
from kvfold.methods.lagkv import LagKV
from kvfold.methods.leverage import Leverage
from kvfold.methods.non_causal import NonCausal
from kvfold.methods.pyramidkv import PyramidKV
from kvfold.methods.random import Random
from kvfold.methods.simlayerkv import SimLayerKV
from kvfold.methods.snapkv import SnapKV
from kvfold.methods.streaming_llm import StreamingLLM
from kvfold.methods.tova import TOVA
from kvfold.methods.zap import Zap

# [name, arguments] of a press; an argument may itself be a press.
Press = list[Any]


def _of(name: str, **arguments: Any) -> Press:
    return [name, arguments]


def _snapkv(method: Any) -> Press:
    return _of("SnapKVPress", window_size=method.window, kernel_size=method.kernel)


# kvpress always pools scores by averages, so a method's `pooling` is not passed on.
PRESSES: dict[type[Method], Callable[[Any], Press]] = {
    SnapKV: _snapkv,
    PyramidKV: lambda m: _of("PyramidKVPress", **_snapkv(m)[1], beta=m.beta),
    KNorm: lambda m: _of("KnormPress"),
    TOVA: lambda m: _of("TOVAPress"),
    Random: lambda m: _of("RandomPress"),
    # Scores the prompt only; H2O also evicts while decoding.
    H2O: lambda m: _of("ObservedAttentionPress"),
    StreamingLLM: lambda m: _of("StreamingLLMPress", n_sink=m.sinks),
    AdaKV: lambda m: _of("AdaKVPress", press=_snapkv(m), alpha_safeguard=m.floor),
    KVzip: lambda m: _of(
        "KVzipPress", layerwise=m.level == "uniform", chunk_size=m.chunk,
        kvzip_plus_normalization=m.normalize,
    ),
    KeyDiff: lambda m: _of("KeyDiffPress"),
    CUR: lambda m: _of(
        "CURPress", num_sinks=m.sinks, leverage_type=m.leverage, local_window_size=m.local
    ),
    LagKV: lambda m: _of("LagKVPress", n_sink=m.sinks, lag_size=m.lag, cross_scoring=m.cross),
    Leverage: lambda m: _of("LeverageScorePress", sketch_dimension=m.sketch),
    NonCausal: lambda m: _of("NonCausalAttnPress", chunk_size=m.chunk),
    Compactor: lambda m: _of(
        "CompactorPress", sink_size_start=m.first, sink_size_end=m.last, chunk_size=m.chunk,
        sketch_dimension=m.sketch, blending=None if m.blending == REMOVED else m.blending,
    ),
    CriticalKV: lambda m: _of(
        "CriticalKVPress", press=_snapkv(m), epsilon=m.epsilon, first_stage_ratio=m.first
    ),
    ExpectedAttention: lambda m: _of(
        "ExpectedAttentionPress", n_future_positions=m.future, n_sink=m.sinks,
        use_covariance=m.covariance, use_vnorm=m.vnorm, epsilon=m.epsilon,
    ),
    # Reads the attention module's input, and keeps equally many entries in every head.
    Zap: lambda m: _of("KVzapPress", model_type="linear"),
    SimLayerKV: lambda m: _of(
        "SimLayerKVPress", lazy_threshold=m.threshold, n_recent=m.window, n_initial=m.sinks
    ),
}  # fmt: skip


def press(label: ParticipantLabel, length: int) -> Press | None:
    """The press for a prompt of `length` tokens.

    None for the full cache, for methods without a counterpart, and for budgets in bytes.
    """
    if label.method == FULL:
        return None
    method = parse(label.method)
    if type(method) not in PRESSES:
        return None
    made = PRESSES[type(method)](method)
    if label.budget is None:
        return made
    budget = Budget.of(label.budget)
    if budget.kind == "bytes":
        return None
    kept = budget.amount if budget.kind == "ratio" else min(1.0, budget.amount / length)
    target = made[1].get("press", made)
    target[1]["compression_ratio"] = 1 - kept
    return made
