"""What happens to a request: read, decoded, judged, reported, within its limits."""

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
from solodg.serving.admission import House
from solodg.serving.batching import MicroBatcher
from solodg.serving.metrics import Metrics
from solodg.serving.refusal import Refusal
from solodg.serving.schemas import Answer, Model, report
from solodg.serving.settings import Settings
from solodg.serving.uploads import Upload, read_uploads

Result = TypeVar("Result")
Draw = Callable[[Pixels], bytes]  # the pixels of one image -> an SVG that explains it


class Service:
    """From a request to its answer, for as many as there is room and time for."""

    def __init__(
        self, predictor: ImagePredictor, name: str, settings: Settings, draw: Draw | None = None
    ) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        self.draw = draw
        self.metrics, self.house = Metrics(), House(settings.queue)
        self.metrics.inside.set_function(lambda: self.house.taken)
        self.batcher = MicroBatcher(predictor, settings.max_batch, self.metrics.computed)
        self.decoders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
        self.drawer = ThreadPoolExecutor(1, thread_name_prefix="draw")  # figures wait, not answers

    async def predict(self, request: Request) -> Answer:
        return await self._within_limits(request, self._answer)

    async def explain(self, request: Request) -> bytes:
        return await self._within_limits(request, self._figure)

    async def _within_limits(
        self, request: Request, work: Callable[[list[Upload]], Awaitable[Result]]
    ) -> Result:
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
                    return await work(uploads)
            except TimeoutError:
                raise Refusal(503, f"no answer {late}.", {"Retry-After": "1"}) from None

    async def _answer(self, uploads: list[Upload]) -> Answer:
        pixels = await asyncio.gather(*(self._pixels(upload) for upload in uploads))
        predictions = await asyncio.gather(*(self.batcher.answer(image) for image in pixels))
        named = zip(uploads, predictions, strict=True)
        return Answer(predictions=[report(upload.name, answer) for upload, answer in named])

    async def _figure(self, uploads: list[Upload]) -> bytes:
        if self.draw is None:
            raise Refusal(404, "no figures here: serve the folder of a run, with its data at hand.")
        if len(uploads) != 1:
            raise Refusal(400, f"{len(uploads)} images: a figure explains one.")
        pixels = await self._pixels(uploads[0])
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.drawer, self.draw, pixels)

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
        self.batcher.close()
        self.decoders.shutdown()
        self.drawer.shutdown(cancel_futures=True)
