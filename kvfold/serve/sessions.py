# SPDX-License-Identifier: Apache-2.0
"""Agents' sessions: begun, continued by new messages, and edited, in worker threads.

Each is changed by one request at a time, and written after every change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from kvfold.contexts.session import Session, begin_session, load_session
from kvfold.contexts.session_record import Message
from kvfold.errors import KvfoldError
from kvfold.hf.user_text import Content
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.errors import ApiError, refusals
from kvfold.serve.pool import UNWRITTEN, Pool
from kvfold.serve.request_schemas import ChatRequest, RequestMessage, SessionEdits, SessionRequest
from kvfold.serve.served_model import AnswerFinished, ServedModel
from kvfold.serve.stored import PrefixKey, Stored

Put = Callable[[Any], None]
log = logging.getLogger(__name__)
# Sessions are kept beside contexts, whose files lie in the folder itself.
FOLDER = "sessions"


class Sessions:
    """The sessions of an engine."""

    def __init__(self, engine: ServedModel) -> None:
        settings = engine.settings
        self.engine = engine
        self.held = SessionPool(
            partial(load_session, model=engine.model, tokenizer=engine.tokenizer),
            _folder(settings.folder),
            settings.session_memory,
            settings.contexts,
            engine.check_wanted,
        )

    def begin(self, request: SessionRequest, _: Put, cancelled: Event) -> Stored[Session]:
        """Reads a session's opening; raises ApiError for a text, method or budget refused."""
        engine, settings = self.engine, self.engine.settings
        engine.start_job(cancelled)
        self.held.check_new(request.id)
        engine.check_text(request.text)
        with refusals():
            session = begin_session(
                engine.model,
                engine.tokenizer,
                Content(request.text),
                engine.clients_method(request.method or settings.session_method),
                request.budget or settings.session_budget,
                prefill_chunk=settings.prefill_chunk,
                special_tokens=settings.special_tokens,
                allow_longer=settings.allow_longer,
            )
        engine.check_wanted()
        return self.held.add(session, request.id)

    def answer(self, request: ChatRequest, put: Put, cancelled: Event) -> AnswerFinished:
        """Appends the request's messages and the answer to them; events as of `Engine.answer`.

        Raises ApiError as that does, and for messages that are not a user's or a tool's; the
        session is then as it was.
        """
        engine, settings = self.engine, self.engine.settings
        engine.start_job(cancelled)
        assert request.session_id is not None
        if request.template is not None:
            named = "chat_template_kwargs" if request.chat_template_kwargs else "reasoning_effort"
            message = f"{named}: a session has no arguments of its template: leave the field out"
            raise ApiError(400, message, param=named)
        messages, new = self._messages(request.messages)
        most = new + engine.tokens_to_generate(new, request)
        with self.held.changing(request.session_id, most) as session, refusals():
            seen = session.ids.shape[1]
            turn = session.open(
                messages,
                prefill_chunk=settings.prefill_chunk,
                special_tokens=settings.special_tokens,
                allow_longer=settings.allow_longer,
            )
            ids = turn.ids[0].tolist()
            with turn.cache.frozen():
                done = engine.generate_answer(request, turn.cache, ids, seen, put, cancelled)
            engine.check_wanted()
            session.close(turn, done.said)
        return done

    def edit(self, name: str, edits: SessionEdits, _: Put, cancelled: Event) -> Stored[Session]:
        """Drops and shortens messages; raises ApiError for edits refused, of which none is done."""
        engine = self.engine
        engine.start_job(cancelled)
        new = sum(len(self._ids_of(text)) for text in edits.shorten.values())
        special_tokens = engine.settings.special_tokens
        with self.held.changing(name, new) as session, refusals():
            session.edit(edits.drop, edits.shorten, edits.now, special_tokens)
        return self.held.get(name)

    def _messages(self, given: Sequence[RequestMessage]) -> tuple[list[Message], int]:
        """Messages to append, and an upper bound of their tokens with the template's."""
        frame = self.engine.prompts.frame
        around = len(self._ids_of(f"{frame.between}{frame.separator}{frame.after}"))
        messages, tokens = [], around
        for one in given:
            if one.role not in ("user", "tool"):
                raise ApiError(
                    400,
                    f"a session holds what was said before: send only new messages of the user or "
                    f"of tools, not the {one.role}'s",
                    param="messages",
                )
            messages.append(Message(one.text, one.role, one.tool_call_id))
            tokens += len(self._ids_of(one.text)) + around
        self.engine.prompts.check_length(tokens)
        return messages, tokens

    def _ids_of(self, text: str) -> list[int]:
        prompts = self.engine.prompts
        return prompts.ids(prompts.split(prompts.client_text(text)))


def _folder(contexts: Path | None) -> ContextFolder:
    """The folder of sessions, in that of contexts; a temporary one where that is read-only."""
    if contexts is not None:
        try:
            return ContextFolder(contexts / FOLDER)
        except KvfoldError as problem:
            log.warning("sessions end with the server: %s", problem)
    return ContextFolder(None)


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
