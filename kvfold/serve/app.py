# SPDX-License-Identifier: Apache-2.0
"""ASGI application of the server: routes, request limits, metrics and error answers."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import kvfold
from kvfold.serve.cross_origin import CrossOrigin
from kvfold.serve.engine import Engine
from kvfold.serve.errors import GONE, HANDLERS, ApiError, invalid, out_of_memory
from kvfold.serve.limits import RequestLimits
from kvfold.serve.metrics import ServerMetrics
from kvfold.serve.response_schemas import ErrorBody, Health, ModelInfo, ModelList
from kvfold.serve.routes import answers, stored

VERBS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH")
LONGEST_PATH = 100  # characters in a message
log = logging.getLogger(__name__)


def build(engine: Engine) -> FastAPI:
    """The ASGI application that serves `engine`."""
    refusal: dict[int | str, dict[str, Any]] = {
        "default": {"model": ErrorBody, "description": "The error, in OpenAI's format."}
    }
    app = FastAPI(
        title="kvfold",
        version=kvfold.__version__,
        docs_url=None,
        redoc_url=None,
        responses=refusal,
        exception_handlers={
            **HANDLERS,
            RequestValidationError: _invalid,
            HTTPException: _http,
            torch.OutOfMemoryError: _out_of_memory,
        },
    )
    metrics = ServerMetrics(engine)
    app.include_router(answers.router(engine, metrics))
    app.include_router(stored.contexts(engine))
    app.include_router(stored.sessions(engine))
    app.include_router(_status(engine, metrics))
    app.add_middleware(RequestLimits, settings=engine.settings, workers=engine.workers)
    app.add_middleware(CrossOrigin, allowed=engine.settings.origins)
    app.add_middleware(RequestMetrics, metrics=metrics)
    return app


def _status(engine: Engine, metrics: ServerMetrics) -> APIRouter:
    """Routes `/v1/models`, `/health`, `/ready` and `/metrics`."""
    made = APIRouter()
    model = ModelInfo(id=engine.name, created=int(time.time()), max_model_len=engine.max_length)

    @made.get("/v1/models", response_model=ModelList)
    def models() -> Any:
        """The list of the one served model."""
        return ModelList(data=[model])

    @made.get("/v1/models/{name:path}", response_model=ModelInfo)
    def one_model(name: str) -> Any:
        """The served model, if it has this name."""
        if name != engine.name:
            raise ApiError(404, f"there is no model {name!r}", code="model_not_found")
        return model

    @made.get("/health", response_model=Health)
    def health() -> Any:
        """Liveness: the process runs."""
        return Health(status="ok")

    @made.get("/ready", response_model=Health)
    def ready() -> Any:
        """Readiness: 503 while the server stops."""
        engine.workers.check_open()
        return Health(status="ready")

    @made.get("/metrics", response_class=Response)
    def read_metrics() -> Any:
        """Metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return made


class RequestMetrics:
    """ASGI middleware: request count and duration by route and status; 500 on an exception.

    Logs a line for each request: its method, route, status and seconds, and nothing that it says.
    The 500 is sent here because starlette's own handler closes the connection afterwards, although
    the client may have sent its next request on it already.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request to the inner application and records it when it ends."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun, started = GONE, False, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status, begun
            status, begun = message.get("status", status), True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500
            if begun:
                raise
            log.exception("a request failed")
            failed = ApiError(500, "the server failed: see its log")
            await failed.response()(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            took = time.perf_counter() - started
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(took)
            verb = scope["method"] if scope["method"] in VERBS else "other"
            log.info("%s %s %d %.3f s", verb, route, status, took)


async def _invalid(request: Request, problem: Any) -> Response:
    return invalid(problem.errors()).response()


async def _http(request: Request, problem: Any) -> Response:
    """Refusals of the framework itself: unknown path, wrong verb, a body that it cannot read."""
    told = "the body cannot be read as JSON"
    if problem.status_code in (404, 405):
        verb = request.method if request.method in VERBS else "such request"
        told = f"there is no {verb} {_short(request.url.path)}: this server has "
        told += ", ".join(_paths(request.app))
    response = ApiError(problem.status_code, told).response()
    response.headers.update(problem.headers or {})
    return response


def _short(path: str) -> str:
    return path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}…"


def _paths(app: FastAPI) -> list[str]:
    """Verbs and paths of all routes in the API's description."""
    described: dict[str, dict[str, Any]] = app.openapi()["paths"]
    return [
        f"{'/'.join(sorted(map(str.upper, verbs)))} {path}" for path, verbs in described.items()
    ]


async def _out_of_memory(request: Request, problem: Any) -> Response:
    return out_of_memory(problem).response()
