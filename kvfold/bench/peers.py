# SPDX-License-Identifier: Apache-2.0
"""Peer libraries by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvfold.bench.kvpress import KvpressPeer
from kvfold.bench.lineup import Peer
from kvfold.bench.models import BenchModel
from kvfold.bench.transformers_quantized import QuantizedPeer
from kvfold.errors import KvfoldError

NAMES = ("kvpress", "transformers-quantized")


@contextmanager
def peers(subject: BenchModel, names: Sequence[str], python: Path | None) -> Iterator[list[Peer]]:
    """Started peers of these names, closed at exit; `python` is kvpress's interpreter.

    Raises KvfoldError for an unknown peer, for one that is not installed, and for kvpress without
    `python`.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise KvfoldError(f"unknown peer {unknown[0]!r}: choose {' or '.join(NAMES)}")
    if "kvpress" in names and python is None:
        raise KvfoldError(
            "kvpress needs transformers < 5.3, so it runs in an environment of its own: make one, "
            "pip install kvpress there, and give its python as --peer-python"
        )
    with ExitStack() as stack:
        found: list[Peer] = []
        for name in dict.fromkeys(names):
            peer: Peer = (
                QuantizedPeer(subject)
                if python is None or name != "kvpress"
                else KvpressPeer(subject, python)
            )
            stack.callback(peer.close)
            found.append(peer)
        yield found
