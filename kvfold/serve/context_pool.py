# SPDX-License-Identifier: Apache-2.0
"""Contexts of a server: in memory up to a cap, the least recently used ones on disk.

One lock guards all state; it is released while a file is written or read. There is no deadlock
over memory: a thread waits for memory only while it uses no context, so every user finishes.
"""

from __future__ import annotations

import logging
import os
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock

from kvfold.contexts.context import Context
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.errors import ApiError
from kvfold.serve.longest_prefix import PrefixIndex, PrefixKey
from kvfold.serve.stored_context import StoredContext, size_of

TOKENS, TEXT = "tokens", "text"
log = logging.getLogger(__name__)


class ContextPool:
    """At most `most` contexts by id, with at most `memory` bytes of them in memory.

    `load` reads a context's file. A context that is deleted while requests use it takes no new
    ones, and is dropped with its file when the last one ends. With `shrink`, a budget, idle
    contexts that keep scores shrink to it before any moves to disk; a file that is there already
    holds the larger one, which is what comes back.
    """

    def __init__(
        self,
        load: Callable[[Path], Context],
        folder: ContextFolder,
        memory: int,
        most: int,
        shrink: float | str | None = None,
    ) -> None:
        self.load, self.folder, self.memory, self.most = load, folder, memory, most
        self.shrink = shrink
        self.nbytes = 0
        self.to_disk = self.to_memory = 0
        self._changed = Condition(Lock())
        # Least recently used first; `_deleted` ones are still read or moved.
        self._held: OrderedDict[str, StoredContext] = OrderedDict()
        self._deleted: dict[str, StoredContext] = {}
        self._prefixes = {TOKENS: PrefixIndex(), TEXT: PrefixIndex()}

    # --- look-up ----------------------------------------------------------------------------

    def all(self) -> list[StoredContext]:
        """Every context, the most recently used last."""
        with self._changed:
            return list(self._held.values())

    def get(self, name: str) -> StoredContext:
        """The context of that id; raises ApiError if there is none."""
        with self._changed:
            return self._named(name)

    def longest(self, kind: str, data: bytes) -> StoredContext | None:
        """The context whose key of `kind` is the longest proper prefix of `data`."""
        with self._changed:
            name = self._prefixes[kind].longest(data)
            return None if name is None else self._held[name]

    @contextmanager
    def reading(self, name: str) -> Iterator[Context]:
        """The context, kept in memory for the block.

        Raises ApiError if it is missing or unreadable.
        """
        with self._changed:
            held = self._named(name)
            held.readers += 1
            self._held.move_to_end(name)
            try:
                context = self._in_memory(held)
            except BaseException:
                self._end_reading(held)
                raise
        try:
            yield context
        finally:
            with self._changed:
                self._end_reading(held)

    # --- add and delete ---------------------------------------------------------------------

    def check_new(self, name: str | None) -> None:
        """Raises ApiError if a new context with that id, or without one, would be refused."""
        with self._changed:
            self._check_new(name)

    def add(
        self,
        context: Context,
        name: str | None = None,
        text: bytes | None = None,
        file: Path | None = None,
    ) -> StoredContext:
        """Stores a context under `name`, or under a new id; raises ApiError if there is no room.

        `text` are the `key_bytes` of its text, if known; `file` is a file that holds it already.
        """
        keys = {TOKENS: key_of_tokens(context.ids[0].tolist())}
        if text is not None:
            keys[TEXT] = PrefixKey.of(text)
        name = name or f"ctx-{uuid.uuid4().hex}"
        held = StoredContext(name, context.stats(), size_of(context), keys, context, file)
        with self._changed:
            self._check_new(name, file)
            self._make_room(held.size)
            try:
                # Room is made with the lock released.
                self._check_new(name, file)
            except ApiError:
                self._free(held.size)
                raise
            self._held[name] = held
            for kind, key in keys.items():
                self._prefixes[kind].add(key, name)
        return held

    def delete(self, name: str) -> None:
        """Deletes a context and its file.

        Raises ApiError if there is none, or the file cannot go.
        """
        with self._changed:
            held = self._named(name)
            if held.file is not None:
                _check_removable(held.file)
                if held.idle:
                    _remove(held.file)
                    held.file = None
            del self._held[name]
            for kind, key in held.keys.items():
                self._prefixes[kind].remove(key, name)
            self._deleted[name] = held
            self._forget_if_unused(held)

    def adopt(self) -> Iterator[Exception]:
        """Loads the context files of the folder; yields the error of each file left out."""
        for name, file in self.folder.found():
            try:
                self.add(self.load(file), name, file=file)
            # Any file may lie in the folder: the server starts without it.
            except Exception as problem:
                yield problem

    def close(self) -> None:
        """Writes contexts that are only in memory to a named folder; all requests have ended."""
        with self._changed:
            if not self.folder.private:
                for held in self._held.values():
                    if held.context is not None and held.file is None:
                        try:
                            held.context.save(self.folder.file(held.id))
                        except KvfoldError as problem:
                            log.error("context %s is lost: %s", held.id, problem)
        self.folder.close()

    # --- with the lock held -----------------------------------------------------------------

    def _named(self, name: str) -> StoredContext:
        if name not in self._held:
            raise ApiError(
                404, f"there is no context {name!r}", code="context_not_found", param="context_id"
            )
        return self._held[name]

    def _check_new(self, name: str | None, file: Path | None = None) -> None:
        taken = name is not None and (name in self._held or name in self._deleted)
        if taken or (name is not None and file is None and self.folder.file(name).exists()):
            raise ApiError(409, f"there is a context {name!r} already", code="context_exists")
        if len(self._held) >= self.most:
            message = f"the server holds its {self.most} contexts: delete one"
            raise ApiError(429, message, code="too_many_contexts", retry_after=60)

    def _in_memory(self, held: StoredContext) -> Context:
        """The context of `held`, loaded if it is on disk. Its reader count keeps it in memory.

        Raises ApiError if the file is missing or damaged.
        """
        while held.moving:
            self._changed.wait()
        if held.context is not None:
            return held.context
        assert held.file is not None
        held.moving = True
        try:
            while held.context is None:
                self._make_room(held.size)
                reserved = held.size
                try:
                    with self._released():
                        context = self.load(held.file)
                        held.size = size_of(context)
                    if held.size <= reserved:
                        held.stats, held.shrunk = context.stats(), False
                        held.context, reserved = context, reserved - held.size
                finally:
                    self._free(reserved)
            self.to_memory += 1
            return held.context
        except ContextFileError as problem:
            raise ApiError(
                410, f"the file of context {held.id!r} is gone or damaged: create it again"
            ) from problem
        finally:
            held.moving = False
            self._changed.notify_all()

    def _make_room(self, size: int) -> None:
        """Reserves `size` bytes of memory: shrinks idle contexts or moves them to disk, or waits.

        Raises ApiError for more than the whole memory, and for a disk that takes no more.
        """
        if size > self.memory:
            raise ApiError(
                413,
                f"the context takes {size} bytes of memory, and the server has {self.memory} for "
                "all: choose a smaller budget, or a shorter text",
                code="context_too_large",
            )
        while self.nbytes + size > self.memory:
            movable = [h for h in self._held.values() if h.context is not None and h.idle]
            if not movable:
                self._changed.wait()
                continue
            large = [h for h in movable if not h.shrunk] if self.shrink is not None else []
            if large:
                self._shrink(large[0])
                continue
            try:
                self._move_to_disk(movable[0])
            except ApiError:
                # The disk is full: contexts that have a file already can still leave memory.
                written = [h for h in movable if h.idle and h.context is not None and h.file]
                if not written:
                    raise
                self._move_to_disk(written[0])
        self.nbytes += size

    def _free(self, size: int) -> None:
        self.nbytes -= size
        self._changed.notify_all()

    def _shrink(self, held: StoredContext) -> None:
        """Replaces a context by a smaller one; it stays as it is where that is refused."""
        assert held.context is not None and self.shrink is not None
        held.moving = held.shrunk = True
        try:
            with self._released():
                smaller = held.context.shrink(self.shrink)
                size, stats = size_of(smaller), smaller.stats()
            held.context, held.stats, freed = smaller, stats, held.size - size
            held.size = size
            self._free(freed)
        except KvfoldError as problem:
            log.info("context %s does not shrink: %s", held.id, problem)
        finally:
            held.moving = False
            self._forget_if_unused(held)
            self._changed.notify_all()

    def _move_to_disk(self, held: StoredContext) -> None:
        assert held.context is not None
        held.moving = True
        try:
            if held.file is None:
                file = self.folder.file(held.id)
                with self._released():
                    held.context.save(file)
                held.file = file
            held.context = None
            self._free(held.size)
            self.to_disk += 1
        except KvfoldError as problem:
            raise ApiError(
                503, "the server cannot move contexts to its disk", retry_after=60
            ) from problem
        finally:
            held.moving = False
            self._forget_if_unused(held)
            self._changed.notify_all()

    def _end_reading(self, held: StoredContext) -> None:
        held.readers -= 1
        self._forget_if_unused(held)
        self._changed.notify_all()

    def _forget_if_unused(self, held: StoredContext) -> None:
        if not held.idle or self._deleted.get(held.id) is not held:
            return
        if held.context is not None:
            held.context = None
            self._free(held.size)
        if held.file is not None:
            try:
                held.file.unlink(missing_ok=True)
            except OSError as problem:
                log.warning("cannot remove the file of context %s: %s", held.id, problem)
        del self._deleted[held.id]

    @contextmanager
    def _released(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()


def _check_removable(file: Path) -> None:
    """Raises ApiError for a file in a read-only folder."""
    if not os.access(file.parent, os.W_OK):
        raise _not_removed(file, "the folder is only read")


def _remove(file: Path) -> None:
    """Removes a file; raises ApiError if that fails."""
    try:
        file.unlink(missing_ok=True)
    except OSError as problem:
        raise _not_removed(file, problem) from problem


def _not_removed(file: Path, problem: object) -> ApiError:
    log.error("cannot remove %s: %s", file, problem)
    message = "the context's file cannot be removed: it stays"
    return ApiError(503, message, code="disk_failed", retry_after=60)


def key_of_tokens(ids: list[int]) -> PrefixKey:
    """The prefix key of token ids."""
    return PrefixKey.of(token_bytes(ids))


def token_bytes(ids: list[int]) -> bytes:
    """Token ids as native 32-bit integers, four bytes each."""
    return array("I", ids).tobytes()
