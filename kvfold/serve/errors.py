# SPDX-License-Identifier: Apache-2.0
"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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
    """The first of pydantic's errors about a request's body."""
    first = errors[0]
    # Between names of fields there are those of types, where several are allowed.
    outer = ("body", "path", "str", "int", "float")
    place = [str(part) for part in first["loc"] if part not in outer and "[" not in str(part)]
    param = ".".join(place) or None
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{first['msg']}", code="invalid_value", param=param)


def _printable(text: str) -> str:
    """Without halves of characters, which JSON can carry and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
