"""What a server says of itself: models, health, version, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from ..._version import __version__
from ..serving import Serving, serving_of

__all__ = ["router"]

router = APIRouter()
PAGE = Path(__file__).parent.parent / "page.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "specdec_ext",
        "max_model_len": serving.llm.memory.max_seq_len,
        "dtype": serving.llm.model.info.dtype,
        "speculation": serving.method,
    }


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A chat in a browser; it loads nothing from elsewhere, and may reach this server alone."""
    return Response(PAGE.read_bytes(), headers=PAGE_HEADERS, media_type="text/html")


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The names under which the model is served."""
    serving = serving_of(request)
    names = serving.settings.served_model_names
    return {"object": "list", "data": [_card(serving, name) for name in names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    serving = serving_of(request)
    return _card(serving, serving.model_name(name))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 as long as the engine lives."""
    bridge = serving_of(request).bridge
    if not bridge.is_alive:
        raise bridge.refusal()
    return JSONResponse({})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken; 503 once the server is told to stop."""
    bridge = serving_of(request).bridge
    if not bridge.is_serving:
        raise bridge.refusal()
    return JSONResponse({})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def exposition(request: Request) -> Response:
    """Prometheus' text format (docs/serve.md)."""
    serving = serving_of(request)
    text = await serving.bridge.in_thread(serving.metrics.exposition)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
