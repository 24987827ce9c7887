"""The interface of training-time methods: losses for an episode, then logits for images."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from solodg.algorithms.ranges import SearchRange
from solodg.errors import UserError
from solodg.models.extractor import Extractor
from solodg.types import Batch, Episode

Batches = Callable[[], Iterable[Batch]]  # the same images at every call


class Outputs(NamedTuple):
    """The predictions of an algorithm for a batch of images, (B, C) each."""

    logits: Tensor
    probabilities: Tensor
    before: Tensor | None  # probabilities before adaptation to the image; None: no adaptation
    readings: Tensor | None = None  # (B,) how often each image was read; None: alike for all


class OtherRate(NamedTuple):
    """A module beside the backbone that learns at another rate than the rest.

    Its rate is that of the backbone, or that of the rest, times `factor`.
    """

    part: nn.Module
    of_backbone: bool
    factor: float


class Algorithm(nn.Module):
    """A training-time method on top of an extractor.

    An algorithm returns losses; the training loop owns the optimiser. Everything that prediction
    needs is a parameter or a buffer. A prediction depends on its own image only: row i of a batch
    equals the prediction for image i alone.
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {"default": {}}  # named sets of arguments
    target_images: ClassVar[int] = 0  # unlabelled images of a test domain for `see_target`
    # Settings that replace the general defaults when the backbone starts from "random" or from
    # "pretrained" weights, or is "frozen". Options that the user gives take precedence.
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "random": {"label_smoothing": 0.1, "decay": "cosine"},
        "pretrained": {},
    }
    # The main arguments that `solodg tune` searches, and the values that they may take.
    search: ClassVar[dict[str, SearchRange]] = {}
    label_smoothing: float = 0.0  # an option of training, set after construction
    domain_images: tuple[int, ...] | None = None  # training images of each source domain, set after
    closed_form: bool = False  # whether `solve` takes the place of training by `losses`
    early_exit: bool = False  # whether images may be read in fewer than all readings
    exits_early: bool = False  # whether some are

    def __init__(self, backbone: Extractor, *, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_classes = num_classes

    def embed(self, x: Tensor) -> Tensor:
        """Returns the embedding (B, D) of images."""
        return self.backbone.embed(x)

    def losses(self, episode: Episode) -> dict[str, Tensor]:
        """Returns `"loss"`, to minimise, and further terms to log, by name."""
        raise NotImplementedError

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """Returns the mean cross-entropy of logits (B, C), with this run's label smoothing.

        Classes with logit -inf take no part in the smoothing.
        """
        if not self.label_smoothing:
            return F.cross_entropy(logits, y)
        log_p = logits.log_softmax(1)
        finite = torch.isfinite(logits)
        spread = log_p.masked_fill(~finite, 0.0).sum(1) / finite.sum(1)
        of_label = log_p.gather(1, y[:, None])[:, 0]
        return -((1 - self.label_smoothing) * of_label + self.label_smoothing * spread).mean()

    def other_rates(self) -> list[OtherRate]:
        """Returns the parts that do not learn at the rate of their kind, if there are any."""
        return []

    @classmethod
    def is_closed_form(cls, arguments: Mapping[str, Any]) -> bool:
        """Returns whether the method with these arguments is solved and not trained."""
        return cls.closed_form

    def solve(self, train: Batches, val: Batches) -> None:
        """Computes the classifier from source training and validation images, in eval mode."""
        raise NotImplementedError

    def finalize(self, source: Iterable[Batch]) -> None:
        """Stores what prediction needs of the source training images. Called in eval mode."""

    def see_target(self, x: Tensor) -> None:
        """Stores what prediction needs of unlabelled images of the domain that is scored next.

        Called in eval mode before each domain, with up to `target_images` images.
        """

    @contextmanager
    def all_readings(self) -> Iterator[None]:
        """Inside, each image is read in all readings, the whole batch at once.

        Not safe for several threads.
        """
        before, self.early_exit = self.early_exit, False
        try:
            yield
        finally:
            self.early_exit = before

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, C) of images (B, ...)."""
        raise NotImplementedError

    def embed_and_classify(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embedding (B, D) and logits (B, C); subclasses do it in one backbone pass."""
        return self.embed(x), self(x)

    def linear_classifier(self) -> tuple[Tensor, Tensor | float]:
        """Returns weight (C, D) and bias of the method's one linear classifier on `embed`.

        Raises `UserError` where the method has no classifier that is the same for all images.
        """
        raise UserError(
            f"{type(self).__name__} has no linear classifier that is the same for all images."
        )

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns class probabilities (B, C) of images; the best calibrated that the method has."""
        return torch.softmax(self(x), dim=1)

    def outputs(self, x: Tensor) -> Outputs:
        """Returns logits and probabilities, before and after adaptation, in one backbone pass."""
        logits = self(x)
        return Outputs(logits, torch.softmax(logits, dim=1), None)


def image_channels(backbone: Extractor, need: str) -> int:
    """Returns the channels of the images that a backbone reads.

    Raises `UserError` where it reads stored features or maps; `need` says why the method needs
    images.
    """
    if backbone.channels is None:
        raise UserError(
            f"{need}: it cannot work on stored features or maps. Train without --freeze-backbone "
            "and --stored-views, e.g. with --train-stages."
        )
    return backbone.channels
