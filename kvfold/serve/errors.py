# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

# What pydantic puts among the names of fields, and where FastAPI found them.
TYPE = re.compile(r"(body|path|query|str|int|float|constrained-.*)$|.*\[")
# Characters of a message: what is refused may be as long as a body.
MOST_SHOWN = 1000
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """What a request is refused with; `retry_after` are seconds."""

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
        """The JSON of the answer."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {
            "message": _printable(self.detail),
            "type": TYPES.get(self.status_code, kind),
            "param": None if self.param is None else _printable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


def invalid(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors about a request's body.

    Where a field allows several types, the one that says what is wrong with a value of its type.
    """
    param = _place(errors[0])
    alike = [error for error in errors if (_place(error) or "").startswith(param or "")]
    said = next((error for error in alike if not error["type"].endswith("_type")), errors[0])
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{said['msg']}", code="invalid_value", param=param)


def _place(error: Any) -> str | None:
    """The field, without the names of types between those of fields where several are allowed."""
    parts = [str(part) for part in error["loc"] if not TYPE.match(str(part))]
    return ".".join(parts) or None


def _printable(text: str) -> str:
    """Its beginning, without halves of characters, which JSON can carry and UTF-8 cannot."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
    return shown.encode(errors="replace").decode()
