# SPDX-License-Identifier: Apache-2.0
"""A server's contexts and sessions by id: in memory up to a cap, the least recently used on disk.

One lock guards all state; it is released while a file is written or read. There is no deadlock
over memory: a thread waits for memory only while it uses none of these, so every user finishes.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from typing import Generic

import torch

from kvfold.cache.stats import Stats
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.errors import ApiError
from kvfold.serve.stored import PrefixIndex, PrefixKey, Stored, Value, size_of

log = logging.getLogger(__name__)
# Errors of a save; a write packs entries, and may run out of memory.
UNWRITTEN = (KvfoldError, MemoryError, torch.OutOfMemoryError)
PATIENCE = 0.5  # seconds after which a request that waits asks whether anyone wants it still


class Pool(Generic[Value]):
    """At most `most` contexts or sessions by id, with at most `memory` bytes of them in memory.

    `load` reads a file. `check_wanted` raises ApiError in a thread whose client hung up, which ends
    its waiting. One that is deleted while requests use it takes no new ones, and is dropped
    with its file when the last one ends.
    """

    noun: str
    prefix: str

    def __init__(
        self,
        load: Callable[[Path], Value],
        folder: ContextFolder,
        memory: int,
        most: int,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self.load: Callable[[Path], Value] = load
        self.check_wanted: Callable[[], None] = check_wanted
        self.folder, self.memory, self.most = folder, memory, most
        self.nbytes = 0
        self.to_disk = self.to_memory = 0
        self._changed = Condition(Lock())
        # Least recently used first; `_deleted` ones are still read or moved.
        self._prefixes: defaultdict[str, PrefixIndex] = defaultdict(PrefixIndex)
        self._held: OrderedDict[str, Stored[Value]] = OrderedDict()
        self._deleted: dict[str, Stored[Value]] = {}
        self._arriving: set[str] = set()  # ids whose files are written before they are held

    # --- look-up ----------------------------------------------------------------------------

    def all(self) -> list[Stored[Value]]:
        """All of them, the most recently used last."""
        with self._changed:
            return list(self._held.values())

    def get(self, name: str) -> Stored[Value]:
        """The item of that id; raises ApiError if there is none."""
        with self._changed:
            return self._named(name)

    @contextmanager
    def reading(self, name: str, found: Stored[Value] | None = None) -> Iterator[Value]:
        """The item of that id, kept in memory for the block.

        Raises ApiError if it is missing or unreadable, or another one than was `found` before.
        """
        with self._changed:
            held = self._named(name)
            if found is not None and held is not found:
                raise ApiError(404, f"the {self.noun} {name!r} was replaced")
            held.readers += 1
            self._held.move_to_end(name)
            try:
                value = self._in_memory(held)
            except BaseException:
                self._end_reading(held)
                raise
        try:
            yield value
        finally:
            with self._changed:
                self._end_reading(held)

    @contextmanager
    def reading_unchanged(self, held: Stored[Value], stats: Stats) -> Iterator[Value | None]:
        """The value of `held`, kept in memory for the block; None if it left it or shrank.

        `stats` are those that it had. This is no use of it: it stays as old as it is.
        """
        with self._changed:
            value = None if held.moving or held.stats is not stats else held.value
            held.readers += value is not None
        try:
            yield value
        finally:
            if value is not None:
                with self._changed:
                    self._end_reading(held)

    @contextmanager
    def spare(self, size: int) -> Iterator[bool]:
        """True if `size` bytes are free, which then are reserved for the block: nothing moves."""
        with self._changed:
            free = self.nbytes + size <= self.memory
            self.nbytes += size * free
        try:
            yield free
        finally:
            with self._changed:
                self._free(size * free)

    # --- add and delete ---------------------------------------------------------------------

    def check_new(self, name: str | None) -> None:
        """Raises ApiError if a new one with that id, or without one, would be refused."""
        with self._changed:
            self._check_new(name)

    def check_size(self, size: int) -> None:
        """Raises ApiError for one of more bytes than there are for all."""
        if size > self.memory:
            raise ApiError(
                413,
                f"the {self.noun} takes {size} bytes of memory, and there are {self.memory} for "
                f"all {self.noun}s: choose a smaller budget, or a shorter text",
                code=f"{self.noun}_too_large",
            )

    def add(
        self,
        value: Value,
        name: str | None = None,
        keys: Mapping[str, PrefixKey] | None = None,
        file: Path | None = None,
    ) -> Stored[Value]:
        """Stores a value under `name`, or under a new id; raises ApiError if there is no room.

        `keys` are further prefix keys of it, by kind; `file` is a file that holds it already.
        """
        name = name or self._new_id()
        known = self._keys(value) | dict(keys or {})
        held = Stored(name, known, value, file, file is None)
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
            for kind, key in known.items():
                self._prefixes[kind].add(key, name)
        return held

    def delete(self, name: str) -> None:
        """Deletes what has that id, and its file.

        Raises ApiError if there is none, or the file cannot go.
        """
        with self._changed:
            held = self._named(name)
            if held.file is not None:
                _remove(held.file, held.idle)
                held.file = None if held.idle else held.file
            del self._held[name]
            for kind, key in held.keys.items():
                self._prefixes[kind].remove(key, name)
            self._deleted[name] = held
            self._forget_if_unused(held)

    def adopt(self) -> Iterator[Exception]:
        """Loads the files of the folder; yields the error of each file left out."""
        for name, file in self.folder.found():
            try:
                self.add(self.load(file), name, self._keys_in(file), file)
            # Any file may lie in the folder: the server starts without it.
            except Exception as problem:
                # Its traceback holds the tensors that were loaded.
                yield problem.with_traceback(None)
        yield from self.folder.unnamed()

    def close(self) -> None:
        """Writes what is only in memory to a named folder; all requests have ended."""
        with self._changed:
            if not self.folder.private:
                for held in self._held.values():
                    if held.value is not None and held.unwritten:
                        try:
                            self._save(held, self.folder.file(held.id))
                        except UNWRITTEN as problem:
                            log.error("%s %s is lost: %s", self.noun, held.id, problem)
        self.folder.close()

    # --- with the lock held -----------------------------------------------------------------

    def _named(self, name: str) -> Stored[Value]:
        if name not in self._held:
            raise ApiError(
                404,
                f"there is no {self.noun} {name!r}",
                code=f"{self.noun}_not_found",
                param=f"{self.noun}_id",
            )
        return self._held[name]

    def _check_new(self, name: str | None, file: Path | None = None) -> None:
        taken = name is not None and (name in self._held or name in self._deleted)
        if name is not None and file is None:
            taken |= name in self._arriving or self.folder.file(name).exists()
        if taken:
            raise ApiError(
                409, f"there is a {self.noun} {name!r} already", code=f"{self.noun}_exists"
            )
        if len(self._held) >= self.most:
            message = f"the server holds its {self.most} {self.noun}s: delete one"
            raise ApiError(429, message, code=f"too_many_{self.noun}s", retry_after=60)

    def _in_memory(self, held: Stored[Value]) -> Value:
        """The value of `held`, loaded if it is on disk. Its reader count keeps it in memory.

        Raises ApiError if the file is missing or damaged.
        """
        while held.moving:
            self._wait()
        if held.value is not None:
            return held.value
        held.moving = True
        try:
            while held.value is None:
                self._make_room(held.size)
                reserved = held.size
                try:
                    value = self._from_file(held)
                    held.size = size_of(value)
                    if held.size <= reserved:
                        held.stats, held.shrunk = value.stats(), False
                        held.value, reserved = value, reserved - held.size
                finally:
                    self._free(reserved)
            return held.value
        finally:
            held.moving = False
            self._changed.notify_all()

    def _from_file(self, held: Stored[Value]) -> Value:
        """The value of a file, read with the lock released; raises ApiError for a damaged one."""
        assert held.file is not None
        try:
            with self._released():
                value = self.load(held.file)
        except ContextFileError as problem:
            raise ApiError(
                410, f"the file of {self.noun} {held.id!r} is gone or damaged: create it again"
            ) from problem
        self.to_memory += 1
        return value

    def _new_id(self) -> str:
        return f"{self.prefix}-{uuid.uuid4().hex}"

    def _make_room(self, size: int) -> None:
        """Reserves `size` bytes of memory: makes idle ones smaller or moves them to disk, or waits.

        Raises ApiError for more than the whole memory, for a disk that takes no more, and where
        nobody wants the memory any more.
        """
        self.check_size(size)
        while self.nbytes + size > self.memory:
            movable = [h for h in self._held.values() if h.value is not None and h.idle]
            if not movable:
                self._wait()
                continue
            if self._made_smaller(movable):
                continue
            try:
                self._move_to_disk(movable[0])
            except ApiError:
                # The disk is full: those that have a file already can still leave memory.
                written = [h for h in movable if h.idle and h.value is not None and not h.unwritten]
                if not written:
                    raise
                self._move_to_disk(written[0])
        self.nbytes += size

    def _wait(self) -> None:
        """Waits until something may have changed; raises ApiError if the client hung up."""
        self._changed.wait(PATIENCE)
        self.check_wanted()

    def _free(self, size: int) -> None:
        self.nbytes -= size
        self._changed.notify_all()

    def _keys(self, value: Value) -> dict[str, PrefixKey]:
        """Prefix keys of a value, by kind."""
        return {}

    def _keys_in(self, file: Path) -> dict[str, PrefixKey]:
        """Prefix keys that only the file of a value knows, by kind."""
        return {}

    def _save(self, held: Stored[Value], file: Path) -> None:
        assert held.value is not None
        held.value.save(file)

    def _made_smaller(self, movable: list[Stored[Value]]) -> bool:
        """Makes one of `movable` smaller in memory; False if none can be."""
        return False

    def _move_to_disk(self, held: Stored[Value]) -> None:
        assert held.value is not None
        held.moving = True
        try:
            if held.unwritten:
                self._write(held)
            held.value = None
            self._free(held.size)
            self.to_disk += 1
        except UNWRITTEN as problem:
            raise ApiError(
                503, f"the server cannot move {self.noun}s to its disk", retry_after=60
            ) from problem
        finally:
            held.moving = False
            self._forget_if_unused(held)
            self._changed.notify_all()

    def _write(self, held: Stored[Value]) -> None:
        """Writes the file of `held`, which nobody else uses, with the lock released."""
        assert held.value is not None
        file = self.folder.file(held.id)
        with self._released():
            self._save(held, file)
        held.file, held.unwritten = file, False

    def _end_reading(self, held: Stored[Value]) -> None:
        held.readers -= 1
        self._forget_if_unused(held)
        self._changed.notify_all()

    def _forget_if_unused(self, held: Stored[Value]) -> None:
        if not held.idle or self._deleted.get(held.id) is not held:
            return
        if held.value is not None:
            held.value = None
            self._free(held.size)
        if held.file is not None:
            try:
                held.file.unlink(missing_ok=True)
            except OSError as problem:
                log.warning("cannot remove the file of %s %s: %s", self.noun, held.id, problem)
        del self._deleted[held.id]

    @contextmanager
    def _released(self) -> Iterator[None]:
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()


def _remove(file: Path, now: bool) -> None:
    """Removes a file `now`, or only checks that it can be removed; raises ApiError if not."""
    try:
        if not os.access(file.parent, os.W_OK):
            raise OSError("the folder is only read")
        if now:
            file.unlink(missing_ok=True)
    except OSError as problem:
        log.error("cannot remove %s: %s", file, problem)
        message = "the file cannot be removed: it stays"
        raise ApiError(503, message, code="disk_failed", retry_after=60) from problem
