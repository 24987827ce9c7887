"""Micro-batches: images of concurrent requests go through the model together.

A batch changes no reported digit. The model predicts each image alone, so a batch differs from a
single image only by the rounding of floating-point sums, by less than `tolerance_of`. Responses
have `DIGITS` decimals. An image is computed again, alone, if one of its numbers lies so near to a
rounding boundary that this could change a digit. So the response equals, digit for digit,
what `predict` returns for the image alone.

No request waits for others: a batch holds the images that arrived while the model was busy.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solodg.pixels import Pixels
from solodg.predict.base import ImagePredictor
from solodg.runs.model_info import ModelInfo
from solodg.runs.predictions import NOVELTY_DIGITS, NotFiniteError, Prediction

DIGITS = 3  # with four, 39% of the images had to be computed again, and batches were slower
NOVELTY_TOLERANCE = 2e-4  # likewise; a difference of distances keeps fewer digits
TOLERANCE = 1e-6  # above the largest change of a probability by a batch that was measured, 4e-7
# With early exit a reading's weight follows from a difference of logits: 3.3e-6 was measured.
EARLY_EXIT_TOLERANCE = 1e-5


class Job(NamedTuple):
    """An image that waits for the model, and the future of its prediction."""

    pixels: Pixels  # (channels, H, W)
    result: "Future[Prediction]"


@dataclass
class MicroBatcher:
    """Runs the model in one thread; requests queue their pixels and await the prediction."""

    predictor: ImagePredictor
    max_batch: int
    on_batch: Callable[[int, int], None] = lambda images, recomputed: None  # called after each

    def __post_init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def predict(self, pixels: Pixels) -> Prediction:
        """Predicts one image of (channels, H, W) pixels, in a batch with whatever else waits."""
        future: Future[Prediction] = Future()
        self._jobs.put(Job(pixels, future))
        return await asyncio.wrap_future(future)  # cancelled with the request that waits for it

    def close(self) -> None:
        """Finishes all queued images, then ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            jobs, last = self._next()
            wanted = [job for job in jobs if job.result.set_running_or_notify_cancel()]
            if wanted:
                self._compute(wanted)
            if last:
                return

    def _next(self) -> tuple[list[Job], bool]:
        """Waits for an image and adds queued ones up to a full batch; True if it is the last."""
        jobs: list[Job] = []
        while len(jobs) < self.max_batch:
            try:
                job = self._jobs.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _compute(self, jobs: list[Job]) -> None:
        """Computes a batch; an image whose prediction is not finite fails alone."""
        tolerance = tolerance_of(self.predictor.info)
        try:
            found = self.predictor.predict_pixels(np.stack([job.pixels for job in jobs]))
            recomputed = 0
            for number, prediction in enumerate(found):
                if len(jobs) > 1 and near_rounding_boundary(prediction, tolerance):
                    (found[number],) = self.predictor.predict_pixels(jobs[number].pixels[None])
                    recomputed += 1
        except NotFiniteError as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._compute([job])
            else:
                jobs[0].result.set_exception(error)
            return
        except Exception as error:  # every request must get its error, and the thread must go on
            for job in jobs:
                job.result.set_exception(error)
            return
        for job, prediction in zip(jobs, found, strict=True):
            job.result.set_result(prediction)
        self.on_batch(len(jobs), recomputed)


def tolerance_of(info: ModelInfo) -> float:
    """Returns how far a batch may change a probability of a model."""
    return EARLY_EXIT_TOLERANCE if info.arguments.get("early_exit") else TOLERANCE


def near_rounding_boundary(prediction: Prediction, tolerance: float = TOLERANCE) -> bool:
    """Returns whether a change by `tolerance` could change the class or a reported digit."""
    after = np.array(list(prediction.probabilities.values()))  # (C,)
    second = np.partition(after, -2)[-2] if len(after) > 1 else 0.0
    if prediction.probability - second < 2 * tolerance:
        return True
    before = np.array(list((prediction.before or {}).values()))
    numbers = np.concatenate([after, before, [prediction.uncertainty]])
    tolerances = np.full(len(numbers), tolerance)
    tolerances[-1] = _uncertainty_tolerance(after, tolerance)
    steps = numbers * 10**DIGITS
    distance = np.abs(steps - np.floor(steps) - 0.5)
    near = bool((distance < tolerances * 10**DIGITS).any())
    if prediction.novelty is None:
        return near
    step = prediction.novelty * 10**NOVELTY_DIGITS
    off = abs(step - np.floor(step) - 0.5)
    return near or bool(off < NOVELTY_TOLERANCE * 10**NOVELTY_DIGITS)


def _uncertainty_tolerance(probabilities: NDArray[np.float64], tolerance: float) -> float:
    """Returns how far `tolerance` in every probability can change the uncertainty."""
    unchanged, up, down = (
        -p * np.log(np.maximum(p, 1e-300))
        for p in (
            probabilities,
            np.minimum(probabilities + tolerance, 1.0),
            np.maximum(probabilities - tolerance, 0.0),
        )
    )
    change = np.maximum(np.abs(up - unchanged), np.abs(down - unchanged)).sum()
    return float(change / np.log(max(2, len(probabilities))) + 1e-9)
