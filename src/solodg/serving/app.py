"""The server's routes: /predict, /explain, /model, /health, /metrics, /docs, and a page at /."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from solodg.predict.base import ImagePredictor
from solodg.serving.docs_page import docs_page
from solodg.serving.draining import BodyDrainingMiddleware
from solodg.serving.loopback_guard import LoopbackGuard
from solodg.serving.metrics import MetricsMiddleware
from solodg.serving.request_error import RequestError
from solodg.serving.schemas import ErrorResponse, HealthResponse, ModelResponse, PredictResponse
from solodg.serving.service import Draw, Service
from solodg.serving.settings import ServerSettings
from solodg.serving.uploads import FORM, RAW

_PAGE = {
    "/": ("solodg.serving", "page.html", "text/html"),
    "/page.js": ("solodg.serving", "page.js", "text/javascript"),
    "/results.js": ("solodg.figures", "results.js", "text/javascript"),
    "/page.css": ("solodg.figures", "page.css", "text/css"),
}
# The browser loads nothing for the page from any other host.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' blob: data:; form-action 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "required": True,
    "content": {
        FORM: {
            "schema": {
                "type": "object",
                "required": ["images"],
                "additionalProperties": False,
                "properties": {
                    "images": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "string", "format": "binary"},
                    }
                },
            }
        },
        "image/*": _BINARY,
        RAW: _BINARY,
    },
}
_ERRORS = {
    400: "A form that cannot be read, or holds no file",
    408: "The request did not arrive in time",
    413: "Too many bytes, images or pixels",
    415: "Not a content type for images",
    422: "An image that cannot be read; the reason names it",
    429: "Too many images at once: try again later",
    500: "The model's output for an image is not finite, or the server failed",
    503: "No response in time, or the server is stopping",
}


def build_app(
    predictor: ImagePredictor,
    name: str,
    settings: ServerSettings,
    draw: Draw | None = None,
    *,
    loopback_only: bool = False,
    trim: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Builds the app that serves one model.

    `draw` draws the figures of /explain, if given. `loopback_only` rejects requests whose Host
    header names another machine. `trim` is called after large images, to return freed memory to
    the system.
    """
    service = Service(predictor, name, settings, draw, trim)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()  # after the last response

    app = FastAPI(
        title="SoloDG",
        version=version("solodg"),
        summary="Classifies images, each on its own.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load their scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    _add_routes(app, service)
    _add_page(app)
    _add_error_handlers(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(BodyDrainingMiddleware, limit=4 * settings.max_bytes)
    app.add_middleware(MetricsMiddleware, metrics=service.metrics, paths=paths)
    if loopback_only:
        app.add_middleware(LoopbackGuard)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    guards: list[Any] = []
    unauthorised: dict[int | str, dict[str, Any]] = {}
    if service.settings.token is not None:
        guards = [Depends(_token_guard(service.settings.token))]
        unauthorised = _described({401: "The bearer token is missing or wrong"})

    @app.post(
        "/predict",
        responses=unauthorised | _described(_ERRORS),
        dependencies=guards,
        openapi_extra={"requestBody": _BODY},
        summary="Class, probabilities and uncertainty of one or several images",
    )
    async def predict(request: Request) -> PredictResponse:
        """Send a form with files, or one image as the body. One bad image rejects the request."""
        return await service.predict(request)

    @app.post(
        "/explain",
        responses=unauthorised
        | _described(_ERRORS | {404: "This server draws no figures"})
        | {200: {"content": {"image/svg+xml": {}}, "description": "The figure"}},
        dependencies=guards,
        openapi_extra={"requestBody": _BODY},
        response_class=Response,
        summary="The adaptation to one image, as a figure",
    )
    async def explain(request: Request) -> Response:
        """Send one image, as for /predict."""
        return Response(await service.explain(request), media_type="image/svg+xml")

    @app.get(
        "/model",
        responses=unauthorised,
        dependencies=guards,
        summary="The served model and the limits of the server",
    )
    async def model() -> ModelResponse:
        return service.model()

    @app.get(
        "/metrics",
        responses=unauthorised,
        dependencies=guards,
        response_class=PlainTextResponse,
        summary="Counters for Prometheus",
    )
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text())

    @app.get("/health", summary="Whether the server is up")
    async def health() -> HealthResponse:
        return HealthResponse(status="ok")


def _token_guard(token: str) -> Any:
    """Returns a dependency that requires the token."""
    scheme = HTTPBearer(auto_error=False)

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        shown = given.credentials.encode() if given else b""
        if not hmac.compare_digest(shown, token.encode()):
            raise RequestError(
                401, "this server requires a bearer token.", {"WWW-Authenticate": "Bearer"}
            )

    return check


def _add_page(app: FastAPI) -> None:
    for path, (package, file, kind) in _PAGE.items():
        app.add_route(path, _static(package, file, kind), include_in_schema=False)

    async def docs(_: Request) -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=_PAGE_HEADERS)

    app.add_route("/docs", docs, include_in_schema=False)


def _static(package: str, file: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(package).joinpath("static", file).read_bytes()

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return send


def _add_error_handlers(app: FastAPI) -> None:
    def problem(status: int, reason: str, headers: Any = None) -> JSONResponse:
        return JSONResponse(ErrorResponse(error=reason).model_dump(), status, headers)

    @app.exception_handler(RequestError)
    async def rejected(_: Request, error: RequestError) -> JSONResponse:
        return problem(error.status, error.reason, error.headers)

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, str(error.errors()[0]["msg"]))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "the connection was closed before the request was complete.")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "the server failed; see its log.")


def _described(reasons: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"model": ErrorResponse, "description": text} for status, text in reasons.items()
    }
