"""The ASGI application: endpoints, what every request passes, errors in one form."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .._version import __version__
from ..llm import LLM
from .errors import install_handlers
from .middleware import AccessLog, BodyLimit, KeyCheck
from .routes import about, chat, completions, responses, text
from .serving import Serving
from .settings import ServerSettings

__all__ = ["create_app"]


def create_app(llm: LLM, settings: ServerSettings) -> FastAPI:
    """The application for one model. It does not close `llm`; `app.state.serving.bridge.drain()`
    is what a server calls when it is told to stop."""
    app = FastAPI(
        title="specdec_ext",
        version=__version__,
        description="OpenAI-compatible server with speculative decoding",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    serving = Serving(llm, settings)
    app.state.serving = serving
    install_handlers(app)
    for module in (about, text, completions, chat, responses):
        app.include_router(module.router)
    # The last one added is the first that a request meets.
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(KeyCheck, keys=serving.keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send headers of their own: OpenAI's, x-stainless-*
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AccessLog)
    return app
