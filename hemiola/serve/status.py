"""What a server says of itself: models, health, version, metrics, a page; and what it does not do."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from hemiola import __version__
from hemiola.serve.encoding import json_response
from hemiola.serve.errors import ApiError
from hemiola.serve.service import Service

# The page is one file that talks to this server and to nobody else.
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()
    model = {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "hemiola",
        "max_model_len": service.engine.max_model_len,
        "chat_template": service.tokenizer is not None and service.tokenizer.chat_template_source() is not None,
    }
    page = files("hemiola.serve").joinpath("page.html").read_bytes()

    @router.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return Response(page, media_type="text/html", headers={"content-security-policy": PAGE_POLICY})

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        service.check_model(name)
        return json_response(model)

    @router.post("/v1/embeddings")
    async def create_embeddings() -> Response:
        raise ApiError(400, "this model generates text; it makes no embeddings", code="unsupported_endpoint")

    @router.get("/health")
    async def health() -> Response:
        """200 while steps come; 503 when they stall or fail, and once the server is shutting down."""
        if service.healthy:
            return json_response({"status": "ok"})
        return json_response({"status": "draining" if service.is_draining else "unhealthy"}, 503)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router
