"""Streams of test images for a test-time method: batch size, domains, order, resets.

The predictions of a method that learns from test images depend on their order, so the stream is
part of the record.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from solodg.adapters import ADAPTERS, Adapter
from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.data.splits import Ints
from solodg.data.transforms import to_unit
from solodg.errors import UserError, unknown_name, validation_error
from solodg.runs.predictions import Predictions
from solodg.seeding import numpy_generator


class Stream(BaseModel):
    """The arguments of a test-time method, and how the test images reach it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arguments: dict[str, Any] = Field(default_factory=dict)  # of the adapter
    batch_size: PositiveInt = 64
    domains: Literal["single", "mixed"] = Field(  # one target after another, or all mixed
        default="single", json_schema_extra={"flag": "--stream"}
    )
    reset: Literal["batch", "domain", "never"] = "domain"  # "batch" of size 1: every image
    order_seed: int = Field(default=0, ge=0)
    images: PositiveInt | None = None  # of each target, drawn by the seed; None: all

    def draw(self, part: LabelledImages) -> LabelledImages:
        """Returns the images of a target domain that are in the stream: `images`, or all."""
        if self.images is None or self.images >= len(part):
            return part
        generator = numpy_generator(self.order_seed, "images", *part.domain_names)
        return part.subset(np.sort(generator.permutation(len(part))[: self.images]))


def adapter_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of an adapter: those given, checked, and defaults for the rest."""
    if name not in ADAPTERS:
        raise unknown_name("adapter", name, ADAPTERS)
    parameters = inspect.signature(ADAPTERS[name]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name != "algorithm"}
    hints = get_type_hints(ADAPTERS[name].__init__, include_extras=True)
    values = dict(defaults)
    for argument, value in arguments.items():
        if argument not in defaults:
            if not defaults:
                raise UserError(f"adapter {name} takes no {argument!r}: it has no arguments.")
            raise unknown_name(f"argument of {name}", argument, defaults)
        try:
            values[argument] = TypeAdapter(hints[argument]).validate_python(value)
        except ValidationError as error:
            what = f"{name}: {argument}={value}"
            raise validation_error(what, error, fields=False) from error
    return values


def make_adapter(name: str, algorithm: Algorithm, arguments: dict[str, Any]) -> Adapter:
    """Builds an adapter by name around a trained algorithm; checks its arguments."""
    values = adapter_arguments(name, arguments)
    return ADAPTERS[name](algorithm, **values)


@torch.inference_mode()
def predict_stream(
    adapter: Adapter,
    parts: Sequence[LabelledImages],
    stream: Stream,
    device: torch.device,
    advance: Callable[[int], None],
) -> list[Predictions]:
    """Runs an adapter over a stream of all images of some domains (`parts`).

    Returns the predictions for each part in the part's own order, whatever the stream's order.
    """
    num_classes = adapter.algorithm.num_classes
    probabilities = [np.zeros((len(part), num_classes)) for part in parts]
    adapter.reset()
    numbers = list(range(len(parts)))
    for group in [numbers] if stream.domains == "mixed" else [[number] for number in numbers]:
        if stream.reset == "domain":
            adapter.reset()
        for which, index in _batches(parts, group, stream):
            if stream.reset == "batch":
                adapter.reset()
            x = to_unit(gather(parts, which, index)).to(device)
            rows = adapter.probabilities(x).double().cpu().numpy()
            for number in np.unique(which):
                probabilities[number][index[which == number]] = rows[which == number]
            advance(len(index))
    return [Predictions(rows) for rows in probabilities]


def _batches(
    parts: Sequence[LabelledImages], group: list[int], stream: Stream
) -> Iterator[tuple[Ints, Ints]]:
    """Yields batches of all images of a group of parts, shuffled.

    A batch is two arrays: the number of the part of each image, and its index in that part.
    """
    which = np.repeat(group, [len(parts[number]) for number in group])
    index = np.concatenate([np.arange(len(parts[number])) for number in group])
    names = [name for number in group for name in parts[number].domain_names]
    order = numpy_generator(stream.order_seed, "stream", *names).permutation(len(which))
    for start in range(0, len(order), stream.batch_size):
        chosen = order[start : start + stream.batch_size]
        yield which[chosen], index[chosen]


def gather(parts: Sequence[LabelledImages], which: Ints, index: Ints) -> torch.Tensor:
    """Returns the images `index` of the parts `which`, in this order: (B, C, H, W) pixels."""
    numbers = np.unique(which)
    images = torch.cat([parts[number].images.take(index[which == number]) for number in numbers])
    place = np.concatenate([np.flatnonzero(which == number) for number in numbers])
    return images[torch.from_numpy(np.argsort(place))]
