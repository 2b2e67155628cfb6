# SPDX-License-Identifier: Apache-2.0
"""`/v1/models`, `/health`, `/ready`, `/metrics`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from kvfold.serve.engine import Engine
from kvfold.serve.errors import ApiError
from kvfold.serve.metrics import Metrics
from kvfold.serve.response_schemas import Health, Model, ModelList


def router(engine: Engine, metrics: Metrics) -> APIRouter:
    """The paths that ask how the server is."""
    made = APIRouter()
    model = Model(id=engine.name, created=int(time.time()), max_model_len=engine.positions)

    @made.get("/v1/models", response_model=ModelList)
    def models() -> Any:
        """The one model."""
        return ModelList(data=[model])

    @made.get("/v1/models/{name:path}", response_model=Model)
    def one_model(name: str) -> Any:
        """The model of that name."""
        if name != engine.name:
            raise ApiError(404, f"there is no model {name!r}", code="model_not_found")
        return model

    @made.get("/health", response_model=Health)
    def health() -> Any:
        """Whether the process is alive."""
        return Health(status="ok")

    @made.get("/ready", response_model=Health)
    def ready() -> Any:
        """Whether requests are taken: not while the server stops."""
        engine.workers.check_open()
        return Health(status="ready")

    @made.get("/metrics", response_class=Response)
    def read_metrics() -> Any:
        """What is counted, as Prometheus reads it."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return made
