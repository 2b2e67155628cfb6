# SPDX-License-Identifier: Apache-2.0
"""The server's sessions: each changed by one request at a time, and written after every change."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvfold.contexts.session import Session
from kvfold.serve.errors import ApiError
from kvfold.serve.longest_prefix import PrefixKey
from kvfold.serve.pool import UNWRITTEN, Pool
from kvfold.serve.stored import Stored

log = logging.getLogger(__name__)


class SessionPool(Pool[Session]):
    """A pool of sessions. In a named folder, files hold every turn and edit that was answered."""

    noun, prefix = "session", "ses"

    def add(
        self,
        value: Session,
        name: str | None = None,
        keys: Mapping[str, PrefixKey] | None = None,
        file: Path | None = None,
    ) -> Stored[Session]:
        held = super().add(value, name, keys, file)
        with self._changed:
            if held.unwritten and held.idle:
                held.readers = 1
                try:
                    self._keep(held)
                finally:
                    self._end_reading(held)
        return held

    @contextmanager
    def changing(self, name: str, tokens: int) -> Iterator[Session]:
        """The session, in memory, which nobody else uses in the block.

        Memory is reserved for `tokens` more of it, and for the copy that a change works on. Raises
        ApiError if it is missing, unreadable, too large, or in use.
        """
        with self._changed:
            held, claimed = self._claimed(name, tokens)
            try:
                if held.value is None:
                    held.note(self._from_file(held))
            except BaseException:
                self._settle(held, claimed)
                raise
        session = held.value
        assert session is not None
        before = session.record
        try:
            yield session
        finally:
            with self._changed:
                if session.record is not before:
                    held.note(session)
                    held.unwritten = True
                self._settle(held, claimed)

    def _claimed(self, name: str, tokens: int) -> tuple[Stored[Session], int]:
        """The session, in use from now on, and the bytes reserved for it and a change of it."""
        while True:
            held = self._named(name)
            if held.moving:
                self._wait()
                continue
            if held.readers:
                raise ApiError(
                    409,
                    f"session {name!r} is in use: send one request after the other",
                    code="session_in_use",
                )
            self._held.move_to_end(name)  # others make room
            size, there = held.size, held.value is not None
            growth = size + math.ceil(tokens * held.stats.nbytes_full / held.stats.seen)
            self._make_room(growth if there else growth + size)
            # Room is made with the lock released: it may be deleted, changed or in use by now.
            same = self._held.get(name) is held and held.idle
            if same and held.size == size and there == (held.value is not None):
                held.readers = 1
                return held, growth + size
            self._free(growth if there else growth + size)

    def _settle(self, held: Stored[Session], claimed: int) -> None:
        """Ends the use of `held`: its own bytes take the place of the claimed ones."""
        try:
            self.nbytes -= claimed - (0 if held.value is None else held.size)
            if held.unwritten:
                self._keep(held)
        finally:
            self._end_reading(held)

    def _keep(self, held: Stored[Session]) -> None:
        """Writes a session to a named folder; where that fails it stays in memory only."""
        if held.value is not None and not self.folder.private:
            try:
                self._write(held)
            except UNWRITTEN as problem:
                log.error("the last change of session %s is in memory only: %s", held.id, problem)
