# SPDX-License-Identifier: Apache-2.0
"""A cache that reads on from another one and shares what that one holds."""

from __future__ import annotations

import copy
import dataclasses

from kvfold.cache import CompressedCache
from kvfold.held import PER_ENTRY
from kvfold.layer import CompressedLayer
from kvfold.owner import Owner
from kvfold.recall import LastQueries
from kvfold.turn import Turn


def fork(cache: CompressedCache) -> CompressedCache:
    """A cache that begins with what `cache` holds, and costs only what it reads itself.

    It evicts and encodes nothing, and its own tokens can be cropped away. Any number of them may
    read at the same time, each in a thread of its own, for as long as `cache` reads nothing itself.
    Only the states of sliding and recurrent layers, which are small, are copied.
    """
    reader = copy.copy(cache)
    reader.turn = Turn(frozen=True, prefix=cache.turn.prefix)
    reader.owner = copy.deepcopy(cache.owner)
    reader.owner.answered()
    reader.layers = [
        _fork_layer(layer, reader.turn, reader.owner)
        if isinstance(layer, CompressedLayer)
        else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    return reader


def _fork_layer(layer: CompressedLayer, turn: Turn, owner: Owner) -> CompressedLayer:
    # How far sinks are moved only depends on what is evicted: from now on they stay where they are.
    layer.settle_sinks()
    other = copy.copy(layer)
    other.turn, other.owner = turn, owner
    other.store = layer.stored().fork()
    other.logical = dataclasses.replace(layer.logical)
    other.last_queries = LastQueries(layer.last_queries.width)
    other.evicted_at = layer.seen
    other.sinks = other.surplus = None
    for name in PER_ENTRY:
        setattr(other, name, None)
    return other
