# SPDX-License-Identifier: Apache-2.0
"""`/v1/contexts` and `/v1/sessions`: make, list, inspect, edit and delete what a pool holds."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvfold.contexts.context import Context
from kvfold.contexts.session import Session
from kvfold.serve.bodies import ThreadParsedRoute
from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError, invalid
from kvfold.serve.pool import Pool
from kvfold.serve.request_schemas import (
    CONTEXT_ID,
    ContextRequest,
    SessionEdits,
    SessionRequest,
)
from kvfold.serve.response_schemas import (
    ColdInfo,
    ContextDeleted,
    ContextDetail,
    ContextInfo,
    ContextList,
    SessionDeleted,
    SessionDetail,
    SessionInfo,
    SessionList,
    SessionMessage,
)
from kvfold.serve.stored import Stored, Value
from kvfold.serve.worker_threads import RequestJob

NAME = Annotated[str, Path(pattern=CONTEXT_ID)]
LIMIT = Annotated[int, Query(ge=1, le=1000)]
AFTER = Annotated[str | None, Query(pattern=CONTEXT_ID)]
JSON, FORM = "application/json", "multipart/form-data"
FIELDS = 10
_TEXT = {"type": "string"}
_UPLOAD = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "A text in UTF-8."},
        "id": _TEXT | {"pattern": CONTEXT_ID},
        "method": _TEXT,
        "budget": _TEXT,
        "system": _TEXT,
        "chat_template_kwargs": _TEXT | {"description": "A JSON object."},
    },
}
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": ContextRequest.model_json_schema()},
            FORM: {"schema": _UPLOAD},
        },
    }
}


def contexts(engine: Engine) -> APIRouter:
    """Routes of contexts."""
    made = APIRouter(prefix="/v1/contexts", route_class=ThreadParsedRoute)

    @made.post("", response_model=ContextDetail, status_code=201, openapi_extra=BODY)
    async def create(request: Request) -> Any:
        """Compresses a text, given as JSON or as a file."""
        asked = await _asked(request)
        job = RequestJob(request, engine.workers, partial(engine.create, asked))
        return _context(await job.result(), engine.name)

    @made.get("", response_model=ContextList)
    def every(limit: LIMIT = 100, after: AFTER = None) -> Any:
        """Lists contexts, oldest first: at most `limit`, after the one with the id `after`."""
        shown, more = _page(engine.contexts, limit, after)
        brief = [_context(one, engine.name).model_dump(exclude={"kept_per_layer"}) for one in shown]
        return ContextList(data=[ContextInfo(**one) for one in brief], has_more=more)

    @made.get("/{context_id}", response_model=ContextDetail)
    def inspect(context_id: NAME) -> Any:
        """One context, with the entries kept per layer and KV head."""
        return _context(engine.contexts.get(context_id), engine.name)

    @made.delete("/{context_id}", response_model=ContextDeleted)
    def delete(context_id: NAME) -> Any:
        """Deletes a context; running answers over it continue."""
        engine.contexts.delete(context_id)
        return ContextDeleted(id=context_id)

    return made


def _context(held: Stored[Context], model: str) -> ContextDetail:
    return ContextDetail(
        **_stored_fields(held, model),
        kept=held.stats.kept_fraction,
        readers=held.readers,
        kept_per_layer=[rows[0] for rows in held.stats.kept],
    )


async def _asked(request: Request) -> ContextRequest:
    """The request from a JSON or form body; raises ApiError for any other body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == JSON:
            return ContextRequest.model_validate(await request.json())
        if kind == FORM:
            return ContextRequest.model_validate(await _form(request))
    except ValidationError as problem:
        raise invalid(problem.errors()) from None
    except ValueError as problem:
        raise ApiError(400, f"the body is no JSON: {problem}", code="invalid_json") from None
    raise ApiError(415, f"send {JSON}, or {FORM} with a file")


async def _form(request: Request) -> dict[str, Any]:
    """The fields of an upload, with the file's content as `text`; raises ApiError."""
    try:
        form = await request.form(max_files=1, max_fields=FIELDS)
    except HTTPException as problem:
        if isinstance(problem, ApiError):  # of the body's size, and time
            raise
        raise ApiError(
            400,
            f"the form cannot be read: {FORM} has a boundary, one file and at most {FIELDS} fields",
        ) from problem
    try:
        fields: dict[str, Any] = dict(form)
        file = fields.pop("file", None)
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file in the field `file`", param="file")
        text = (await file.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ApiError(400, "the file is no text in UTF-8", param="file") from None
    finally:
        await form.close()
    if isinstance(arguments := fields.get("chat_template_kwargs"), str):
        try:
            fields["chat_template_kwargs"] = json.loads(arguments)
        except (ValueError, RecursionError):
            message = "chat_template_kwargs: an object is wanted, as JSON"
            raise ApiError(400, message, param="chat_template_kwargs") from None
    return fields | {"text": text}


def sessions(engine: Engine) -> APIRouter:
    """Routes of engine.sessions."""
    made = APIRouter(prefix="/v1/sessions", route_class=ThreadParsedRoute)

    @made.post("", response_model=SessionDetail, status_code=201)
    async def begin(request: Request, body: SessionRequest) -> Any:
        """Reads an agent's instructions, which stay whole."""
        job = RequestJob(request, engine.workers, partial(engine.sessions.begin, body))
        return _session(await job.result(), engine.name)

    @made.get("", response_model=SessionList)
    def every(limit: LIMIT = 100, after: AFTER = None) -> Any:
        """Lists sessions, oldest first: at most `limit`, after the one with the id `after`."""
        shown, more = _page(engine.sessions.held, limit, after)
        brief = [_session(one, engine.name).model_dump(exclude={"messages"}) for one in shown]
        return SessionList(data=[SessionInfo(**one) for one in brief], has_more=more)

    @made.get("/{session_id}", response_model=SessionDetail)
    def inspect(session_id: NAME) -> Any:
        """One session, with its messages."""
        return _session(engine.sessions.held.get(session_id), engine.name)

    @made.post("/{session_id}/edits", response_model=SessionDetail)
    async def edit(request: Request, session_id: NAME, body: SessionEdits) -> Any:
        """Drops and shortens messages: at once, or when enough of it has come together."""
        job = RequestJob(request, engine.workers, partial(engine.sessions.edit, session_id, body))
        return _session(await job.result(), engine.name)

    @made.delete("/{session_id}", response_model=SessionDeleted)
    def delete(session_id: NAME) -> Any:
        """Deletes a session; a running turn of it continues."""
        engine.sessions.held.delete(session_id)
        return SessionDeleted(id=session_id)

    return made


def _session(held: Stored[Session], model: str) -> SessionDetail:
    record = held.record
    assert record is not None
    return SessionDetail(
        **_stored_fields(held, model),
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


def _page(pool: Pool[Value], limit: int, after: str | None) -> tuple[list[Stored[Value]], bool]:
    """At most `limit`, oldest first, after the one with the id `after`; True if more follow."""
    held = sorted(pool.all(), key=_age)
    if after is not None:
        first = _age(pool.get(after))
        held = [one for one in held if _age(one) > first]
    return held[:limit], len(held) > limit


def _stored_fields(held: Stored[Value], model: str) -> dict[str, Any]:
    """The fields of `StoredInfo`."""
    return {
        "id": held.id,
        "created": held.created,
        "model": model,
        "method": held.stats.method,
        "budget": held.stats.budget,
        "tokens": held.stats.seen,
        "bytes": held.size,
        "bytes_full": held.stats.nbytes_full,
        "cold": ColdInfo(host=held.stats.cold.host, filed=held.stats.cold.filed),
        "place": held.place,
    }


def _age(held: Stored[Value]) -> tuple[int, str]:
    """Sort key: creation time and id, which do not change between pages."""
    return held.created, held.id
