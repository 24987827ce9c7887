"""Serves a request within its limits: reads, decodes and predicts its images."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import TypeVar

from starlette.requests import Request

from solodg.pixels import BadImageError, Pixels, TooManyPixelsError, decode_pixels
from solodg.predict.base import ImagePredictor
from solodg.predict.onnx import OnnxPredictor
from solodg.runs.predictions import NotFiniteError
from solodg.serving.admission import AdmissionLimit
from solodg.serving.batching import MicroBatcher
from solodg.serving.metrics import ServerMetrics
from solodg.serving.request_error import RequestError
from solodg.serving.schemas import ModelResponse, PredictResponse, image_prediction
from solodg.serving.settings import ServerSettings
from solodg.serving.uploads import Upload, read_uploads

Result = TypeVar("Result")
Draw = Callable[[Pixels], bytes]  # pixels of one image -> SVG of its explanation


class Service:
    """Turns requests into responses, within the limits on images, bytes and time."""

    def __init__(
        self,
        predictor: ImagePredictor,
        name: str,
        settings: ServerSettings,
        draw: Draw | None = None,
    ) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        self.draw = draw
        self.metrics, self.admission = ServerMetrics(), AdmissionLimit(settings.queue)
        self.metrics.admitted.set_function(lambda: self.admission.used)
        self.batcher = MicroBatcher(predictor, settings.max_batch, self.metrics.count_batch)
        self.decoders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
        # A separate thread, so that figures do not delay predictions.
        self.drawer = ThreadPoolExecutor(1, thread_name_prefix="draw")

    async def predict(self, request: Request) -> PredictResponse:
        """Predicts the images of a request."""
        return await self._within_limits(request, self._predictions)

    async def explain(self, request: Request) -> bytes:
        """Draws the explanation of the one image of a request, as SVG."""
        return await self._within_limits(request, self._figure)

    async def _within_limits(
        self, request: Request, work: Callable[[list[Upload]], Awaitable[Result]]
    ) -> Result:
        with self.admission.admit() as slots:
            deadline = asyncio.get_running_loop().time() + self.settings.seconds
            limit = f"within {self.settings.seconds:g} seconds"
            try:
                async with asyncio.timeout_at(deadline):
                    uploads = await read_uploads(request, self.settings)
            except TimeoutError:
                raise RequestError(408, f"the request did not arrive {limit}.") from None
            slots.take(len(uploads) - 1)
            try:
                async with asyncio.timeout_at(deadline):
                    return await work(uploads)
            except TimeoutError:
                raise RequestError(503, f"no response {limit}.", {"Retry-After": "1"}) from None

    async def _predictions(self, uploads: list[Upload]) -> PredictResponse:
        pixels = await asyncio.gather(*(self._pixels(upload) for upload in uploads))
        try:
            found = await asyncio.gather(*(self.batcher.predict(image) for image in pixels))
        except NotFiniteError as error:
            raise RequestError(500, str(error)) from error
        named = zip(uploads, found, strict=True)
        return PredictResponse(
            predictions=[image_prediction(upload.name, prediction) for upload, prediction in named]
        )

    async def _figure(self, uploads: list[Upload]) -> bytes:
        if self.draw is None:
            raise RequestError(
                404,
                "this server draws no figures: serve the folder of a run whose data are present.",
            )
        if len(uploads) != 1:
            raise RequestError(400, f"{len(uploads)} images: a figure explains one image.")
        pixels = await self._pixels(uploads[0])
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.drawer, self.draw, pixels)
        except NotFiniteError as error:
            raise RequestError(500, str(error)) from error

    async def _pixels(self, upload: Upload) -> Pixels:
        decode = partial(
            decode_pixels,
            upload.content,
            channels=self.predictor.info.channels,
            size=self.predictor.info.image_size,
            window=self.predictor.info.window,
            limits=self.settings.decode_limits,
            name=upload.name or "in the request",
        )
        try:
            return await asyncio.get_running_loop().run_in_executor(self.decoders, decode)
        except TooManyPixelsError as error:
            raise RequestError(413, str(error)) from error
        except BadImageError as error:
            raise RequestError(422, str(error)) from error

    def model(self) -> ModelResponse:
        """Describes the served model and the limits of the server."""
        settings = self.settings
        return ModelResponse(
            name=self.name,
            runtime="ONNX Runtime" if isinstance(self.predictor, OnnxPredictor) else "PyTorch",
            solodg=version("solodg"),
            explains=self.draw is not None,
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
        """Finishes queued images and ends all threads."""
        self.batcher.close()
        self.decoders.shutdown()
        self.drawer.shutdown(cancel_futures=True)
