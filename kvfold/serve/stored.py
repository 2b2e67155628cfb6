# SPDX-License-Identifier: Apache-2.0
"""A context or a session of the server, in memory or as a file, and the prefixes it is found by."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from kvfold.cache.stats import Stats
from kvfold.contexts.context import Context
from kvfold.contexts.session import Session
from kvfold.contexts.session_record import SessionRecord

Value = TypeVar("Value", Context, Session)


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


@dataclass(eq=False)
class Stored(Generic[Value]):
    """A context or session and its state in the server; all but `value` is known on disk, too.

    Args:
        id: the id that requests name.
        stats: kept entries and bytes, as of the compressed document.
        size: bytes in memory.
        keys: prefix keys by kind: of its tokens, and of its text up to the question.
        value: None while it is only on disk.
        file: None until it was written; holds a context as it was before it shrank.
        unwritten: it has changed since its file was written, or has none.
        created: Unix time in seconds.
        readers: requests that use it.
        moving: a thread is writing or reading the file, or shrinks the context.
        shrunk: the context in memory has shrunk, or cannot.
        record: of a session: its messages.
    """

    id: str
    keys: dict[str, PrefixKey]
    value: Value | None
    file: Path | None
    unwritten: bool
    stats: Stats = field(init=False)
    size: int = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    readers: int = 0
    moving: bool = False
    shrunk: bool = False
    record: SessionRecord | None = None

    def __post_init__(self) -> None:
        assert self.value is not None
        self.note(self.value)

    def note(self, value: Value) -> None:
        """Holds a value, and what is known of it on disk, too."""
        self.value, self.stats, self.size = value, value.stats(), size_of(value)
        self.record = value.record if isinstance(value, Session) else None

    @property
    def idle(self) -> bool:
        """True if no request uses it and no thread moves it."""
        return not self.readers and not self.moving

    @property
    def place(self) -> Literal["memory", "disk"]:
        """Its place now."""
        return "disk" if self.value is None else "memory"


def size_of(value: Context | Session) -> int:
    """Bytes of all tensors of a context or session: layers of both kinds, and token ids.

    Cold entries in host memory count, those in a file do not.
    """
    stats = value.stats()
    held = stats.nbytes + stats.other_bytes + stats.cold.host + stats.id_bytes
    return held + value.ids.nbytes
