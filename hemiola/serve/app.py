"""The ASGI application: all endpoints over one service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from hemiola import __version__
from hemiola.serve.admission import BodyLimit, KeyCheck
from hemiola.serve.chat import chat_routes
from hemiola.serve.completions import completion_routes
from hemiola.serve.encoding import json_response
from hemiola.serve.errors import ApiError, of_engine, of_validation
from hemiola.serve.responses import response_routes
from hemiola.serve.service import Service
from hemiola.serve.status import status_routes
from hemiola.serve.tokenization import tokenization_routes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("hemiola.serve")


def build_app(service: Service, tracer_provider: TracerProvider | None = None) -> FastAPI:
    """The service starts and stops with the application. tracer_provider: takes a span per request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="hemiola",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracer_provider": tracer_provider, "operation_spans": False, "logs": False},
    )
    for routes in (chat_routes, completion_routes, response_routes, tokenization_routes, status_routes):
        app.include_router(routes(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _defect)
    config = service.config
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if config.api_keys:
        app.add_middleware(KeyCheck, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _respond(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


async def _api_error(request: Request, error: Any) -> Response:
    return _respond(error)


async def _validation_error(request: Request, error: Any) -> Response:
    return _respond(of_validation(error.errors(), error.body))


async def _http_error(request: Request, error: Any) -> Response:
    """An unknown path or method, and what the framework refuses."""
    return _respond(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _defect(request: Request, error: Exception) -> Response:
    log.error("a defect in %s", request.url.path, exc_info=error)
    return _respond(of_engine("the server failed on this request; its log says how"))
