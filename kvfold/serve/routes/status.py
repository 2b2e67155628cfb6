# SPDX-License-Identifier: Apache-2.0
"""Routes `/v1/models`, `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError
from kvfold.serve.metrics import ServerMetrics
from kvfold.serve.response_schemas import Health, ModelInfo, ModelList


def router(engine: Engine, metrics: ServerMetrics) -> APIRouter:
    """Routes of the model list and for monitoring."""
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
