"""Galleries of a report: a few images of a domain, each on a card with its explanation."""

from dataclasses import dataclass, field, replace

from solodg.explain.explanation import Explanation, explain_pixels
from solodg.explain.figure import probabilities_figure, projection_figure
from solodg.explain.projection import Projection
from solodg.figures.html import Picture, chart, photo
from solodg.predict.torch import Predictor
from solodg.progress import Progress
from solodg.report.predictions import GALLERIES, DomainPredictions
from solodg.runs.predictions import Prediction, top_class

MAX_CARDS = 48  # on a page, which stays small enough to send

_TITLES = {
    "helped": ("Helped most", "wrong before the adaptation to the image, right after it"),
    "hurt": ("Hurt most", "right before the adaptation to the image, wrong after it"),
    "mistaken": ("Surest mistakes", "wrong with the highest probability"),
    "uncertain": ("Most uncertain", "the flattest probabilities, right or wrong"),
}


@dataclass(frozen=True)
class Card:
    """An image of a gallery, with its explanation."""

    index: int  # among the scored images of its domain
    image: Picture
    truth: str
    prediction: Prediction
    right: bool
    figures: list[Picture]
    nearest: list[tuple[Picture, str]]  # source training images with their captions
    aligned: Picture | None  # the image with its pose corrected; None: the model has no pose part

    @property
    def after(self) -> str:
        """The predicted class with its probability."""
        return top_class(self.prediction.probabilities)

    @property
    def before(self) -> str:
        """The class predicted before adaptation with its probability; empty: nothing adapts."""
        return "" if self.prediction.before is None else top_class(self.prediction.before)


@dataclass(frozen=True)
class Gallery:
    """The first images of one of the `GALLERIES` on one domain."""

    kind: str
    title: str
    note: str
    total: int  # images that the cards were chosen from
    cards: list[Card] = field(default_factory=list)


def domain_galleries(
    predictor: Predictor,
    projection: Projection,
    part: DomainPredictions,
    count: int,
    progress: Progress,
) -> list[Gallery]:
    """Explains the first `count` images of each gallery of a domain.

    The model must be in the state in which it predicted the domain.
    """
    ranked = {kind: GALLERIES[kind](part) for kind in _kinds(part)}
    galleries = []
    total = sum(min(count, len(indices)) for indices in ranked.values())
    with progress.bar(f"Drawing {part.domain}", total) as advance:
        for kind, indices in ranked.items():
            gallery = Gallery(kind, *_TITLES[kind], len(indices))
            galleries.append(gallery)
            for index in indices[:count]:
                gallery.cards.append(_card(part, int(index), predictor, projection))
                advance(1)
    return galleries


def _kinds(part: DomainPredictions) -> list[str]:
    """Returns the galleries of a domain; nothing is helped or hurt where nothing adapts."""
    adapts = part.predictions.before is not None
    return [kind for kind in GALLERIES if adapts or kind not in ("helped", "hurt")]


def _card(
    part: DomainPredictions, index: int, predictor: Predictor, projection: Projection
) -> Card:
    pixels = part.pixels.images.take([index])[0].numpy()  # (channels, H, W)
    found = explain_pixels(predictor, projection, pixels, truth=int(part.labels[index]))
    # The numbers of the table: those of the image alone differ in their last digits.
    e = replace(found, predictions=part.predictions.of_image(index))
    truth = e.classes[int(part.labels[index])]
    alt = f"{truth} of {part.domain}"
    return Card(
        index=index,
        image=photo(e.pixels, alt),
        truth=truth,
        prediction=e.prediction,
        right=bool(part.right[index]),
        figures=[
            chart(projection_figure(e), f"{alt} in the projection of the source class centres"),
            chart(probabilities_figure(e), f"Probabilities of the classes for {alt}"),
        ],
        nearest=_nearest(e),
        aligned=None if e.aligned is None else photo(e.aligned, f"{alt} with its pose corrected"),
    )


def _nearest(e: Explanation) -> list[tuple[Picture, str]]:
    thumbnails = e.projection.thumbnails
    return [
        (photo(thumbnails[n.index], f"{n.label} of {n.domain}"), f"{n.label}, {n.domain}")
        for n in e.nearest
    ]
