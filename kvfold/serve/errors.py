# SPDX-License-Identifier: Apache-2.0
"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvfold.errors import KvfoldError
from kvfold.serve.field_refusals import absent_at, refusal_of

log = logging.getLogger(__name__)

# nginx's status for a client that closed the connection; nobody reads the answer.
GONE = 499

# Location parts that are no field: FastAPI's source of the value, pydantic's names of types.
TYPE = re.compile(r"(body|path|query|str|int|float|constrained-.*)$|.*\[")
# Characters of a message: it may quote a value as long as the body.
MOST_SHOWN = 1000
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error answer with an HTTP status, in OpenAI's format; `retry_after` in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(status, message)
        self.code, self.param, self.retry_after = code, param, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {
            "message": _printable(self.detail),
            "type": TYPES.get(self.status_code, kind),
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response, with `Retry-After` and `WWW-Authenticate` where they apply."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


@contextmanager
def refusals(*, code: str | None = None, param: str | None = None) -> Iterator[None]:
    """Turns kvfold's own errors in the block into a 400 with their message."""
    try:
        yield
    except KvfoldError as refused:
        raise ApiError(400, str(refused), code=code, param=param) from refused


def invalid(errors: Sequence[Any]) -> ApiError:
    """A 400 from pydantic's errors about a request: the first field that is wrong.

    A field that the server does not have comes before others. A field of several types has an error
    for each; the one about the value's own type is shown.
    """
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, refusal_of(None, errors[0]), code="invalid_json")
    errors = [error for error in errors if absent_at(_place(error))] or errors
    param = _place(errors[0])
    alike = [error for error in errors if (_place(error) or "").startswith(param or "")]
    said = next((error for error in alike if not error["type"].endswith("_type")), errors[0])
    param = _place(said)
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{refusal_of(param, said)}", code="invalid_value", param=param)


def _place(error: Any) -> str | None:
    """The field's dotted path, without pydantic's names of types; None for the whole body."""
    parts = [str(part) for part in error["loc"] if not TYPE.match(str(part))]
    return ".".join(parts) or None


def _printable(text: str) -> str:
    """The first characters of a text; lone surrogates, which UTF-8 cannot encode, become `?`."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
    return shown.encode(errors="replace").decode()


async def _refused(request: Request, refused: Any) -> Response:
    response: Response = refused.response()
    return response


async def _gone(request: Request, problem: Any) -> Response:
    return Response(status_code=GONE)


# Answers of both applications to these exceptions.
HANDLERS: dict[Any, Any] = {ApiError: _refused, ClientDisconnect: _gone}


def out_of_memory(problem: Exception) -> ApiError:
    """The answer to a request that the GPU had no memory for; logs the reason."""
    log.error("out of memory: %s", problem)
    message = "the server is out of memory: send less, or try again later"
    return ApiError(503, message, code="out_of_memory", retry_after=10)
