# SPDX-License-Identifier: Apache-2.0
"""`/v1/contexts`: create, list, inspect and delete contexts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from kvfold.serve.bodies import ThreadParsedRoute
from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError, invalid
from kvfold.serve.limits import RESERVATION
from kvfold.serve.request_schemas import CONTEXT_ID, ContextRequest
from kvfold.serve.response_schemas import ContextDeleted, ContextDetail, ContextInfo, ContextList
from kvfold.serve.routes.hangup import unless_gone
from kvfold.serve.stored_context import StoredContext
from kvfold.serve.worker_threads import WorkerJob

JSON, FORM = "application/json", "multipart/form-data"
NAME = Annotated[str, Path(pattern=CONTEXT_ID)]
LIMIT = Annotated[int, Query(ge=1, le=1000)]
AFTER = Annotated[str | None, Query(pattern=CONTEXT_ID)]
_TEXT = {"type": "string"}
_UPLOAD = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "A text in UTF-8."},
        "id": _TEXT | {"pattern": CONTEXT_ID},
        "method": _TEXT,
        "budget": _TEXT,
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


def router(engine: Engine) -> APIRouter:
    """Routes of contexts."""
    made = APIRouter(prefix="/v1/contexts", route_class=ThreadParsedRoute)

    @made.post("", response_model=ContextDetail, status_code=201, openapi_extra=BODY)
    async def create(request: Request) -> Any:
        """Compresses a text, given as JSON or as a file."""
        asked = await _asked(request)
        job = WorkerJob(engine.workers, partial(engine.create, asked), request.scope[RESERVATION])
        held: StoredContext = await unless_gone(request, job, job.next())
        return held.info(engine.name)

    @made.get("", response_model=ContextList)
    def every(limit: LIMIT = 100, after: AFTER = None) -> Any:
        """Lists contexts, oldest first: at most `limit`, after the one with the id `after`."""
        held = sorted(engine.contexts.all(), key=_age)
        if after is not None:
            first = _age(engine.contexts.get(after))
            held = [one for one in held if _age(one) > first]
        shown = [ContextInfo(**_brief(one, engine.name)) for one in held[:limit]]
        return ContextList(data=shown, has_more=len(held) > limit)

    @made.get("/{context_id}", response_model=ContextDetail)
    def inspect(context_id: NAME) -> Any:
        """One context, with the entries kept per layer and KV head."""
        return engine.contexts.get(context_id).info(engine.name)

    @made.delete("/{context_id}", response_model=ContextDeleted)
    def delete(context_id: NAME) -> Any:
        """Deletes a context; running answers over it continue."""
        engine.contexts.delete(context_id)
        return ContextDeleted(id=context_id)

    return made


def _age(held: StoredContext) -> tuple[int, str]:
    """Sort key of the list: creation time and id, which do not change between pages."""
    return held.created, held.id


def _brief(held: StoredContext, model: str) -> dict[str, Any]:
    return held.info(model).model_dump(exclude={"kept_per_layer"})


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
    except (ValueError, RecursionError) as problem:
        raise ApiError(400, f"the body is no JSON: {problem}", code="invalid_json") from None
    raise ApiError(415, f"send {JSON}, or {FORM} with a file")


async def _form(request: Request) -> dict[str, Any]:
    """The fields of an upload, with the file's content as `text`; raises ApiError."""
    async with request.form(max_files=1, max_fields=10) as form:
        fields: dict[str, Any] = dict(form)
        file = fields.pop("file", None)
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file in the field `file`", param="file")
        try:
            text = (await file.read()).decode()
        except UnicodeDecodeError:
            raise ApiError(400, "the file is no text in UTF-8", param="file") from None
    return fields | {"text": text}
