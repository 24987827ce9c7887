"""The server's doors: /predict, /model, /health, /metrics, its OpenAPI, and a page at /."""

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from solodg.onnx_model import OnnxPredictor
from solodg.pixels import BadImageError, Pixels, TooManyPixelsError, decode_pixels
from solodg.prediction import ImagePredictor
from solodg.serving.answers import Answer, Health, Model, Problem, report
from solodg.serving.batching import MicroBatcher
from solodg.serving.docs_page import docs_page
from solodg.serving.draining import Draining
from solodg.serving.house import House
from solodg.serving.metrics import Measured, Metrics
from solodg.serving.refusal import Refusal
from solodg.serving.settings import Settings
from solodg.serving.uploads import FORM, RAW, Upload, read_uploads

_PAGE = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
         "/page.css": ("page.css", "text/css")}  # fmt: skip
# All that the page needs comes from here, and nothing is allowed to come from elsewhere.
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
_REFUSALS = {
    400: "A form that cannot be read, or holds no file",
    408: "The request did not arrive in time",
    413: "Too many bytes, images or pixels",
    415: "Not a content type for images",
    422: "An image that cannot be read; the reason names it",
    429: "Too many images at once: come again",
    503: "No answer in time, or the server is stopping",
}


class Service:
    """What the doors share."""

    def __init__(self, predictor: ImagePredictor, name: str, settings: Settings) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        self.metrics, self.house = Metrics(), House(settings.queue)
        self.metrics.inside.set_function(lambda: self.house.taken)
        self.batcher = MicroBatcher(predictor, settings.max_batch, self.metrics.computed)
        self.decoders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")

    async def predict(self, request: Request) -> Answer:
        with self.house.visit() as visit:
            deadline = asyncio.get_running_loop().time() + self.settings.seconds
            late = f"within {self.settings.seconds:g} seconds"
            try:
                async with asyncio.timeout_at(deadline):
                    uploads = await read_uploads(request, self.settings)
            except TimeoutError:
                raise Refusal(408, f"the request did not arrive {late}.") from None
            visit.take(len(uploads) - 1)
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._answer(uploads)
            except TimeoutError:
                raise Refusal(503, f"no answer {late}.", {"Retry-After": "1"}) from None

    async def _answer(self, uploads: list[Upload]) -> Answer:
        pixels = await asyncio.gather(*(self._pixels(upload) for upload in uploads))
        predictions = await asyncio.gather(*(self.batcher.answer(image) for image in pixels))
        named = zip(uploads, predictions, strict=True)
        return Answer(predictions=[report(upload.name, answer) for upload, answer in named])

    async def _pixels(self, upload: Upload) -> Pixels:
        decode = partial(
            decode_pixels,
            upload.content,
            channels=self.predictor.info.channels,
            size=self.predictor.info.image_size,
            trust=self.settings.trust,
            name=upload.name or "in the request",
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self.decoders, decode)
        except TooManyPixelsError as error:
            raise Refusal(413, str(error)) from error
        except BadImageError as error:
            raise Refusal(422, str(error)) from error

    def model(self) -> Model:
        settings = self.settings
        return Model(
            name=self.name,
            runtime="ONNX Runtime" if isinstance(self.predictor, OnnxPredictor) else "PyTorch",
            solodg=version("solodg"),
            model=self.predictor.info.model_dump(),
            limits={
                "images": settings.max_images,
                "bytes": settings.max_bytes,
                "pixels": settings.max_pixels,
                "queue": settings.queue,
                "seconds": settings.seconds,
            },
        )

    def close(self) -> None:
        self.batcher.close()
        self.decoders.shutdown()


def build_app(predictor: ImagePredictor, name: str, settings: Settings) -> FastAPI:
    service = Service(predictor, name, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()  # after the last request was answered

    app = FastAPI(
        title="SoloDG",
        version=version("solodg"),
        summary=f"Classes of images, each judged alone, by {name}.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages fetch their scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _add_doors(app, service)
    _add_page(app)
    _add_refusals(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    app.add_middleware(Draining, limit=4 * settings.max_bytes)
    app.add_middleware(Measured, metrics=service.metrics, paths=paths)
    return app


def _add_doors(app: FastAPI, service: Service) -> None:
    guards: list[Any] = []
    unknown: dict[int | str, dict[str, Any]] = {}
    if service.settings.token is not None:
        guards = [Depends(_token_guard(service.settings.token))]
        unknown = _described({401: "The bearer token is missing or wrong"})

    @app.post(
        "/predict",
        responses=unknown | _described(_REFUSALS),
        dependencies=guards,
        openapi_extra={"requestBody": _BODY},
        summary="Class, probabilities and uncertainty of one or several images",
    )
    async def predict(request: Request) -> Answer:
        """Send a form with files, or one image as the body. All are answered, or none."""
        return await service.predict(request)

    @app.get("/model", responses=unknown, dependencies=guards, summary="What is served, and how")
    async def model() -> Model:
        return service.model()

    @app.get(
        "/metrics",
        responses=unknown,
        dependencies=guards,
        response_class=PlainTextResponse,
        summary="Counters for Prometheus",
    )
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text())

    @app.get("/health", summary="Whether the server is up")
    async def health() -> Health:
        return Health(status="ok")


def _token_guard(token: str) -> Any:
    """A dependency that lets in who knows the token."""
    scheme = HTTPBearer(auto_error=False)

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)]) -> None:
        shown = given.credentials.encode() if given else b""
        if not hmac.compare_digest(shown, token.encode()):
            raise Refusal(
                401, "this server asks for a bearer token.", {"WWW-Authenticate": "Bearer"}
            )

    return check


def _add_page(app: FastAPI) -> None:
    for path, (file, kind) in _PAGE.items():
        app.add_route(path, _static(file, kind), include_in_schema=False)

    async def docs(_: Request) -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=_PAGE_HEADERS)

    app.add_route("/docs", docs, include_in_schema=False)


def _static(file: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("solodg.serving").joinpath(file).read_bytes()

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return send


def _add_refusals(app: FastAPI) -> None:
    def problem(status: int, reason: str, headers: Any = None) -> JSONResponse:
        return JSONResponse(Problem(error=reason).model_dump(), status, headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> JSONResponse:
        return problem(error.status, error.reason, error.headers)

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return problem(422, str(error.errors()[0]["msg"]))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "the connection was closed before the request was whole.")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return problem(500, "the server failed; its log says why.")


def _described(reasons: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem, "description": text} for status, text in reasons.items()}
