# SPDX-License-Identifier: Apache-2.0
"""The server's sessions: each changed by one request at a time, and written after every change."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from kvfold.contexts.session import Session
from kvfold.errors import KvfoldError
from kvfold.serve.errors import ApiError
from kvfold.serve.pool import Pool
from kvfold.serve.stored import Stored

log = logging.getLogger(__name__)


class SessionPool(Pool[Session]):
    """A pool of sessions. In a named folder, files hold every turn and edit that was answered."""

    noun, prefix = "session", "ses"

    @contextmanager
    def changing(self, name: str, tokens: int) -> Iterator[Session]:
        """The session, in memory, which nobody else uses in the block.

        Memory is reserved for `tokens` more of it, and for the copy that a change works on. Raises
        ApiError if it is missing, unreadable, too large, or in use.
        """
        with self._changed:
            held = self._named(name)
            reserved = self._taken(held, tokens)
            self._held.move_to_end(name)
            try:
                session = self._in_memory(held)
            except BaseException:
                self._free(reserved)
                self._end_reading(held)
                raise
        before = session.record
        try:
            yield session
        finally:
            with self._changed:
                self._free(reserved)
                if session.record is not before:
                    self._note_change(held, session)
                self._end_reading(held)

    def _taken(self, held: Stored[Session], tokens: int) -> int:
        """Bytes reserved for a change of `held`, which is in use from now on."""
        while True:
            while held.moving:
                self._changed.wait()
            if held.readers:
                raise ApiError(
                    409,
                    f"session {held.id!r} is in use: send one request after the other",
                    code="session_in_use",
                )
            there, stats = held.value is not None, held.stats
            growth = held.size + math.ceil(tokens * stats.nbytes_full / stats.seen)
            needed = growth if there else growth + held.size
            self._make_room(needed)
            # Room is made with the lock released: it may be deleted, moved or in use by now.
            if self._held.get(held.id) is held and held.idle and there == (held.value is not None):
                break
            self._free(needed)
            self._named(held.id)
        held.readers = 1
        if not there:
            self._free(held.size)  # for `_in_memory`, which takes it before the lock is released
        return growth

    def _note_change(self, held: Stored[Session], session: Session) -> None:
        self.nbytes -= held.size
        held.note(session)
        self.nbytes += held.size
        held.unwritten = True
        if not self.folder.private:
            try:
                self._write(held)
            except KvfoldError as problem:
                log.error("the last change of session %s is in memory only: %s", held.id, problem)
