# SPDX-License-Identifier: Apache-2.0
"""Longest-prefix match of a prompt over the stored contexts, by length and checksum."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class PrefixKey(NamedTuple):
    """A prefix: its length in bytes and its BLAKE2b digest."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> PrefixKey:
        """The key of all of `data`."""
        return cls(len(data), hashlib.blake2b(data).digest())


class PrefixIndex:
    """Prefix keys with the names stored under each; a look-up hashes its bytes once in total."""

    def __init__(self) -> None:
        # length → digest → names, the newest last
        self._named: dict[int, dict[bytes, list[str]]] = {}

    def add(self, key: PrefixKey, name: str) -> None:
        """Adds `name` under `key`."""
        self._named.setdefault(key.length, {}).setdefault(key.digest, []).append(name)

    def remove(self, key: PrefixKey, name: str) -> None:
        """Removes `name` from `key`; raises KeyError if it was not added."""
        of_length = self._named[key.length]
        of_length[key.digest].remove(name)
        if not of_length[key.digest]:
            del of_length[key.digest]
        if not of_length:
            del self._named[key.length]

    def longest(self, data: bytes) -> str | None:
        """The newest name under the longest key that is a proper prefix of `data`, or None."""
        made, start, found = hashlib.blake2b(), 0, None
        for length in sorted(length for length in self._named if length < len(data)):
            made.update(data[start:length])
            start = length
            names = self._named[length].get(made.digest())
            found = names[-1] if names else found
        return found
