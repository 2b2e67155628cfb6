# SPDX-License-Identifier: Apache-2.0
"""`/v1/sessions`: begin, list, inspect, edit and delete sessions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from kvfold.contexts.session import Session
from kvfold.serve.bodies import ThreadParsedRoute
from kvfold.serve.engine import Engine
from kvfold.serve.request_schemas import SessionEdits, SessionRequest
from kvfold.serve.response_schemas import (
    SessionDeleted,
    SessionDetail,
    SessionInfo,
    SessionList,
    SessionMessage,
)
from kvfold.serve.routes.hangup import RequestJob
from kvfold.serve.routes.pages import AFTER, LIMIT, NAME, page, stored_fields
from kvfold.serve.stored import Stored


def router(engine: Engine) -> APIRouter:
    """Routes of sessions."""
    made = APIRouter(prefix="/v1/sessions", route_class=ThreadParsedRoute)
    sessions = engine.sessions

    @made.post("", response_model=SessionDetail, status_code=201)
    async def begin(request: Request, body: SessionRequest) -> Any:
        """Reads an agent's instructions, which stay whole."""
        job = RequestJob(request, engine.workers, partial(sessions.begin, body))
        return _detail(await job.result(), engine.name)

    @made.get("", response_model=SessionList)
    def every(limit: LIMIT = 100, after: AFTER = None) -> Any:
        """Lists sessions, oldest first: at most `limit`, after the one with the id `after`."""
        shown, more = page(sessions.held, limit, after)
        brief = [_detail(one, engine.name).model_dump(exclude={"messages"}) for one in shown]
        return SessionList(data=[SessionInfo(**one) for one in brief], has_more=more)

    @made.get("/{session_id}", response_model=SessionDetail)
    def inspect(session_id: NAME) -> Any:
        """One session, with its messages."""
        return _detail(sessions.held.get(session_id), engine.name)

    @made.post("/{session_id}/edits", response_model=SessionDetail)
    async def edit(request: Request, session_id: NAME, body: SessionEdits) -> Any:
        """Drops and shortens messages: at once, or when enough of it has come together."""
        job = RequestJob(request, engine.workers, partial(sessions.edit, session_id, body))
        return _detail(await job.result(), engine.name)

    @made.delete("/{session_id}", response_model=SessionDeleted)
    def delete(session_id: NAME) -> Any:
        """Deletes a session; a running turn of it continues."""
        sessions.held.delete(session_id)
        return SessionDeleted(id=session_id)

    return made


def _detail(held: Stored[Session], model: str) -> SessionDetail:
    record = held.record
    assert record is not None
    return SessionDetail(
        **stored_fields(held, model),
        entries=held.stats.mean_kept,
        in_use=held.readers > 0,
        turns=record.turns,
        compactions=record.compactions,
        messages=[
            SessionMessage(
                id=item.id, role=item.role, tokens=item.tokens, queued=item.id in record.queued
            )
            for item in record.items
        ],
    )
