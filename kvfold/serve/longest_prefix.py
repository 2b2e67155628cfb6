# SPDX-License-Identifier: Apache-2.0
"""Which of many held beginnings is the longest that something begins with."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Key(NamedTuple):
    """A beginning, by its length in bytes and its checksum."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> Key:
        """The key of all of `data`."""
        return cls(len(data), hashlib.blake2b(data).digest())


class Prefixes:
    """Keys, each with the names it was given; a look-up reads its bytes once, whatever is held."""

    def __init__(self) -> None:
        # length → digest → names, the newest last
        self._named: dict[int, dict[bytes, list[str]]] = {}

    def add(self, key: Key, name: str) -> None:
        """Holds `key`."""
        self._named.setdefault(key.length, {}).setdefault(key.digest, []).append(name)

    def remove(self, key: Key, name: str) -> None:
        """Holds `key` no longer by that name."""
        of_length = self._named[key.length]
        of_length[key.digest].remove(name)
        if not of_length[key.digest]:
            del of_length[key.digest]
        if not of_length:
            del self._named[key.length]

    def longest(self, data: bytes) -> str | None:
        """The newest name of the longest key that `data` begins with and goes on after."""
        made, start, found = hashlib.blake2b(), 0, None
        for length in sorted(length for length in self._named if length < len(data)):
            made.update(data[start:length])
            start = length
            names = self._named[length].get(made.digest())
            found = names[-1] if names else found
        return found
