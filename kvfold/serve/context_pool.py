# SPDX-License-Identifier: Apache-2.0
"""The server's contexts: found by prompts that begin with them, shrunk to save memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

from kvfold.cache.shrink import shrink
from kvfold.contexts.context import Context
from kvfold.contexts.files.format import read_header
from kvfold.contexts.files.header import TextHeader
from kvfold.contexts.files.write import save
from kvfold.errors import CodecRefusal, KvfoldError, ScorerFileError
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.pool import UNWRITTEN, Pool
from kvfold.serve.stored import PrefixKey, Stored

TOKENS, TEXT = "tokens", "text"
log = logging.getLogger(__name__)


class ContextPool(Pool[Context]):
    """A pool of contexts, by the keys of their tokens, and of their texts where these are known.

    Files are written with `codec`, or with "zstd" where that refuses a context. With `shrink`, a
    budget, idle contexts that keep scores shrink to it before any moves to disk; a file that is
    there already holds the larger one, which is what comes back. Cold entries stay in the file.
    """

    noun, prefix = "context", "ctx"

    def __init__(
        self,
        load: Callable[[Path], Context],
        folder: ContextFolder,
        memory: int,
        most: int,
        shrink: float | str | None = None,
        codec: str | None = None,
        check_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(load, folder, memory, most, check_wanted)
        self.shrink, self.codec = shrink, codec

    def add(
        self,
        value: Context,
        name: str | None = None,
        keys: Mapping[str, PrefixKey] | None = None,
        file: Path | None = None,
    ) -> Stored[Context]:
        if file is not None or not value.stats().cold.host:
            return super().add(value, name, keys, file)
        name = name or self._new_id()
        with self._changed:
            self._check_new(name)
            self._arriving.add(name)
        try:
            filed = self._filed(Stored(name, dict(keys or {}), value, None, True))
            if filed is not None:
                return self._added(*filed, name, keys)
        finally:
            with self._changed:
                self._arriving.remove(name)
        return super().add(value, name, keys)

    def _filed(self, held: Stored[Context]) -> tuple[Context, Path] | None:
        """The context with its cold entries in the file that is written; None where that fails."""
        file = self.folder.file(held.id)
        try:
            self._save(held, file)
            return self.load(file), file
        except UNWRITTEN as problem:
            log.error("cold entries of context %s stay in memory: %s", held.id, problem)
            file.unlink(missing_ok=True)
            return None

    def _added(
        self, value: Context, file: Path, name: str, keys: Mapping[str, PrefixKey] | None
    ) -> Stored[Context]:
        """As `Pool.add`, which removes the file where it raises."""
        try:
            return super().add(value, name, keys, file)
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def longest(self, kind: str, data: bytes) -> Stored[Context] | None:
        """The context whose key of `kind` is the longest proper prefix of `data`."""
        with self._changed:
            name = self._prefixes[kind].longest(data)
            return None if name is None else self._held[name]

    def _keys(self, value: Context) -> dict[str, PrefixKey]:
        return {TOKENS: PrefixKey.of(token_bytes(value.ids[0].tolist()))}

    def _keys_in(self, file: Path) -> dict[str, PrefixKey]:
        text = read_header(file).text
        return {} if text is None else {TEXT: PrefixKey(text.length, bytes.fromhex(text.digest))}

    def _save(self, held: Stored[Context], file: Path) -> None:
        assert held.value is not None
        key = held.keys.get(TEXT)
        text = None if key is None else TextHeader(length=key.length, digest=key.digest.hex())
        codecs = [] if self.codec is None else [self.codec, "zstd"]
        for codec, other in zip(codecs, ("with codec zstd", "without a codec"), strict=False):
            try:
                return save(held.value, file, codec=codec, text=text)
            except (CodecRefusal, ScorerFileError) as refused:
                log.warning("context %s is saved %s: %s", held.id, other, refused)
        save(held.value, file, text=text)

    def _made_smaller(self, movable: list[Stored[Context]]) -> bool:
        large = [held for held in movable if not held.shrunk]
        if self.shrink is None or not large:
            return False
        self._shrink(large[0], self.shrink)
        return True

    def _shrink(self, held: Stored[Context], budget: float | str) -> None:
        """Makes a context smaller, layer by layer; it stays as it is where that is refused.

        Nobody else uses it, so it shrinks in place: a copy would have to be counted, too.
        """
        assert held.value is not None
        held.moving = held.shrunk = True
        before = held.size
        try:
            with self._released():
                held.value.check()
                shrink(held.value.cache, budget)
            held.note(held.value)
            self._free(before - held.size)
        except KvfoldError as problem:
            log.info("context %s does not shrink: %s", held.id, problem)
        except BaseException:
            # Some layers have shrunk; a file has all of the larger context.
            if held.unwritten:
                held.note(held.value)
                self._free(before - held.size)
            else:
                held.value = None
                self._free(before)
            raise
        finally:
            held.moving = False
            self._forget_if_unused(held)
            self._changed.notify_all()


def token_bytes(ids: list[int]) -> bytes:
    """Token ids as native 32-bit integers, four bytes each."""
    return array("I", ids).tobytes()
