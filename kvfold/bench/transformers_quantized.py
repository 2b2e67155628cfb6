# SPDX-License-Identifier: Apache-2.0
"""transformers' QuantizedCache as a peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import cache_utils

from kvfold.bench.baseline import twin
from kvfold.bench.lineup import Makers
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import CacheSize, LocalParticipant, ParticipantLabel
from kvfold.bench.record import BenchCell
from kvfold.errors import KvfoldError
from kvfold.hf.models import text_config
from kvfold.measure.machine import MachineSetup

BITS = 4
# Backends of QuantizedCache, and the module each one imports.
BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}


def backend() -> str:
    """The first backend that is installed; raises KvfoldError if none is."""
    for name, module in BACKENDS.items():
        if importlib.util.find_spec(module.partition(".")[0]) and importlib.util.find_spec(module):
            return name
    raise KvfoldError(
        "transformers' quantized cache needs a backend: pip install optimum-quanto, or hqq"
    )


class QuantizedParticipant(LocalParticipant):
    """transformers' 4-bit cache; quantization time counts as prefill."""

    def __init__(self, subject: BenchModel) -> None:
        super().__init__(self.label_here(), subject, twin(subject.model))

    @staticmethod
    def label_here() -> ParticipantLabel:
        """The participant's label, with the installed backend."""
        return ParticipantLabel("transformers", f"{backend()} {BITS} bit")

    def make(self, room: int) -> Any:
        return cache_utils.QuantizedCache(backend(), text_config(self.model), nbits=BITS)

    def cache_size(self) -> CacheSize:
        counted: set[int] = set()
        nbytes = sum(tensor_bytes(vars(layer), counted) for layer in self.cache.layers)
        return CacheSize(nbytes, 1.0)


class QuantizedPeer:
    """The peer with one participant, QuantizedSide; raises KvfoldError without a backend."""

    name = "transformers"

    def __init__(self, subject: BenchModel) -> None:
        backend()
        self.subject, self.setup = subject, MachineSetup.here()

    def makers(self, wanted: Sequence[ParticipantLabel]) -> Makers:
        """Constructor of the one participant; `wanted` does not matter."""
        return {QuantizedParticipant.label_here(): partial(QuantizedParticipant, self.subject)}

    def left_out(self, label: ParticipantLabel, cell: BenchCell) -> None:
        """None: it runs every cell."""

    def close(self) -> None:
        """Nothing to end: it runs in this process."""


def tensor_bytes(thing: Any, counted: set[int]) -> int:
    """Bytes of all storages in nested containers and quantized tensors.

    A storage is counted once; `counted` holds the data pointers of those counted so far.
    """
    if isinstance(thing, Tensor):
        if hasattr(thing, "__tensor_flatten__"):
            names = thing.__tensor_flatten__()[0]
            return sum(tensor_bytes(getattr(thing, name), counted) for name in names)
        storage = thing.untyped_storage()
        if storage.data_ptr() in counted:
            return 0
        counted.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(thing, dict):
        return sum(tensor_bytes(value, counted) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(tensor_bytes(value, counted) for value in thing)
    return 0
