"""Serves a request within its limits: reads, decodes and predicts its images."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from typing import TypeVar

from starlette.requests import Request

from solodg.pixels import BadImageError, Pixels, TooManyPixelsError, decode_pixels
from solodg.predict.base import ImagePredictor
from solodg.runs.predictions import NotFiniteError
from solodg.serving.admission import AdmissionLimit
from solodg.serving.batching import MicroBatcher
from solodg.serving.decode_budget import DecodeBudget
from solodg.serving.metrics import ServerMetrics
from solodg.serving.request_error import RequestError
from solodg.serving.schemas import ModelResponse, PredictResponse, image_prediction
from solodg.serving.settings import ServerSettings
from solodg.serving.uploads import Upload, read_uploads

# Freed bytes that are worth returning to the system: while images are decoded, and afterwards.
_BUSY_BYTES, _IDLE_BYTES = 64 * 1024**2, 4 * 1024**2
_IDLE_SECONDS = 1.0
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
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        self.draw, self.trim = draw, trim
        self.scores = predictor.recorded_scores()
        self.metrics = ServerMetrics()
        self.admission = AdmissionLimit(
            settings.queue, max(settings.queue_bytes, settings.max_bytes)
        )
        self.budget = DecodeBudget(settings.decode_pixels)
        self._freed = 0  # bytes of large images and requests since memory was last returned
        self.metrics.admitted.set_function(lambda: self.admission.used)
        self.batcher = MicroBatcher(predictor, settings.max_batch, self.metrics.count_batch)
        threads = os.cpu_count() or 1
        self.decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        # Images wait here and not in the queue of the threads, which would hold the bytes of
        # requests that were given up.
        self._free_decoders = asyncio.Semaphore(threads)
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
        try:
            return await self._admitted(request, work)
        finally:
            if not self.admission.used and self._freed >= _IDLE_BYTES:
                # Later, because an error in flight may still refer to an image.
                loop = asyncio.get_running_loop()
                loop.call_later(_IDLE_SECONDS, self._return_memory, _IDLE_BYTES)

    async def _admitted(
        self, request: Request, work: Callable[[list[Upload]], Awaitable[Result]]
    ) -> Result:
        with self.admission.admit() as slots:
            deadline = asyncio.get_running_loop().time() + self.settings.seconds
            limit = f"within {self.settings.seconds:g} seconds"
            try:
                async with asyncio.timeout_at(deadline):
                    uploads = await read_uploads(request, self.settings, slots.take_bytes)
            except TimeoutError:
                raise RequestError(408, f"the request did not arrive {limit}.") from None
            slots.take(len(uploads) - 1)
            try:
                async with asyncio.timeout_at(deadline):
                    return await work(uploads)
            except TimeoutError:
                raise RequestError(503, f"no response {limit}.", {"Retry-After": "1"}) from None
            finally:
                self._freed += slots.bytes

    async def _predictions(self, uploads: list[Upload]) -> PredictResponse:
        pixels = await self._all_pixels(uploads)
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

    async def _all_pixels(self, uploads: list[Upload]) -> list[Pixels]:
        tasks = [asyncio.create_task(self._pixels(upload)) for upload in uploads]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after a bad image, the others are not decoded
                task.cancel()

    async def _pixels(self, upload: Upload) -> Pixels:
        loop = asyncio.get_running_loop()
        try:
            async with self._free_decoders:
                return await loop.run_in_executor(self.decoders, self._decoded, upload)
        except TooManyPixelsError as error:
            raise RequestError(413, str(error)) from error
        except BadImageError as error:
            raise RequestError(422, str(error)) from error

    def _decoded(self, upload: Upload) -> Pixels:
        """Decodes an image; waits until there is room for its pixels, and frees it at the end."""
        with ExitStack() as room:

            def reserve(pixels: int) -> None:
                room.enter_context(self.budget.reserve(pixels))
                self._freed += 4 * pixels  # Pillow's bytes for a pixel in colour

            pixels = decode_pixels(
                upload.content,
                channels=self.predictor.info.channels,
                size=self.predictor.info.image_size,
                window=self.predictor.info.window,
                limits=self.settings.decode_limits,
                name=upload.name or "in the request",
                reserve=reserve,
            )
            self._return_memory(_BUSY_BYTES)
            return pixels

    def _return_memory(self, worthwhile: int) -> None:
        """Returns freed memory to the system if so many bytes were freed since the last time."""
        if self._freed >= worthwhile:
            self._freed = 0
            self.trim()

    def model(self) -> ModelResponse:
        """Describes the served model and the limits of the server."""
        settings = self.settings
        return ModelResponse(
            name=self.name,
            runtime=self.predictor.runtime,
            solodg=version("solodg"),
            explains=self.draw is not None,
            model=self.predictor.info.model_dump(),
            scores=self.scores,
            limits={
                "images": settings.max_images,
                "bytes": settings.max_bytes,
                "pixels": settings.max_pixels,
                "decode_pixels": settings.decode_pixels,
                "queue": settings.queue,
                "queue_bytes": self.admission.max_bytes,
                "seconds": settings.seconds,
            },
        )

    def close(self) -> None:
        """Finishes queued images and ends all threads."""
        self.batcher.close()
        self.decoders.shutdown()
        self.drawer.shutdown(cancel_futures=True)
