"""Images of concurrent requests go through the model together, and no answer changes by it.

The model judges each image alone, so a batch differs from one image only by the rounding of
floating-point sums. Answers are reported to `DIGITS` decimals. If no reported number of an image
lies so near to where rounding tips over that `SLACK` could tip it, the batch reports what the image
alone would; if one does, the image is computed again, alone. So what is reported is, digit for
digit, what `predict` says of the image alone.

Nobody waits for company: a batch is what has come in while the model was busy.
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
from solodg.predict.base import ImagePredictor, Prediction

DIGITS = 3  # with four, two images of five were computed again: no gain was left
SLACK = 1e-6  # more than a batch changes a probability by: 4e-7 was seen, and the tests measure


class Job(NamedTuple):
    pixels: Pixels  # (C, H, W)
    answer: "Future[Prediction]"


@dataclass
class MicroBatcher:
    """One thread that owns the model; requests leave pixels and wait for their answer."""

    predictor: ImagePredictor
    max_batch: int
    computed: Callable[[int, int], None] = lambda images, again: None  # told of every batch

    def __post_init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def answer(self, pixels: Pixels) -> Prediction:
        future: Future[Prediction] = Future()
        self._jobs.put(Job(pixels, future))
        return await asyncio.wrap_future(future)  # cancelled with the request that waits for it

    def close(self) -> None:
        """Finish what was taken, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            jobs, last = self._next()
            wanted = [job for job in jobs if job.answer.set_running_or_notify_cancel()]
            if wanted:
                self._compute(wanted)
            if last:
                return

    def _next(self) -> tuple[list[Job], bool]:
        """What is there, up to a full batch; waits for the first. And whether it was the last."""
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
        try:
            answers = self.predictor.predict_pixels(np.stack([job.pixels for job in jobs]))
            again = 0
            for number, answer in enumerate(answers):
                if len(jobs) > 1 and could_tip(answer):
                    (answers[number],) = self.predictor.predict_pixels(jobs[number].pixels[None])
                    again += 1
        except Exception as error:  # whoever waits must hear of it, and the thread must live
            for job in jobs:
                job.answer.set_exception(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)
        self.computed(len(jobs), again)


def could_tip(answer: Prediction) -> bool:
    """Whether `SLACK` could change the class or a reported digit."""
    after = np.array(list(answer.probabilities.values()))
    rival = np.partition(after, -2)[-2] if len(after) > 1 else 0.0
    if answer.probability - rival < 2 * SLACK:
        return True
    before = np.array(list((answer.before or {}).values()))
    numbers = np.concatenate([after, before, [answer.uncertainty]])
    slack = np.full(len(numbers), SLACK)
    slack[-1] = _entropy_slack(after)
    steps = numbers * 10**DIGITS
    to_tip = np.abs(steps - np.floor(steps) - 0.5)
    return bool((to_tip < slack * 10**DIGITS).any())


def _entropy_slack(probabilities: NDArray[np.float64]) -> float:
    """How far `SLACK` in every probability can move the uncertainty."""
    own, up, down = (
        -p * np.log(np.maximum(p, 1e-300))
        for p in (
            probabilities,
            np.minimum(probabilities + SLACK, 1.0),
            np.maximum(probabilities - SLACK, 0.0),
        )
    )
    moved = np.maximum(np.abs(up - own), np.abs(down - own)).sum()
    return float(moved / np.log(max(2, len(probabilities))) + 1e-9)
