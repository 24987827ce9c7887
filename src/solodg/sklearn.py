"""`SoloClassifier`: `solo_plus` and its like as a scikit-learn classifier of feature vectors."""

from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from solodg.algorithms import ALGORITHMS, Algorithm, build_algorithm
from solodg.data.domains import SourceData
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.held_rows import is_missing
from solodg.data.labelled_images import LabelledImages
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.data.transforms import unaugmented
from solodg.errors import UserError, unknown_name
from solodg.inference import inference_batch_size
from solodg.models.extractor import Standardised
from solodg.runs.defaults import checked_arguments
from solodg.runs.feature_cache import StoredFeatures
from solodg.runs.fit import Schedule, fit, start
from solodg.runs.predictions import NotFiniteError, check_finite
from solodg.seeding import derive, unchanged_generators
from solodg.types import Batch

_LINEAR = ("erm", "solo_plus")


class SoloClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifies rows of features of domains that it was not trained on.

    `fit(X, y, domains=...)` takes rows of features, their classes, and the domain (site, camera,
    style) of each row. Without domains, or with a single one, it makes `n_domains` by clustering
    the features. The features serve both as embedding, which is classified, and as style, which
    describes the domain.

    Parameters
    ----------
    algorithm
        "solo_plus", the default also of `solodg train`; "solo", the paper's method, in which each
        row writes its own classifier; or another entry of `solodg.algorithms.ALGORITHMS` that works
        on features. The parts of `solo_plus` that adapt to an image need its pixels, so on features
        it is a linear classifier; one written for each row has not gained over it where both were
        measured. "ridge" is solved in closed form, at once; what concerns updates has no effect.
    arguments
        Arguments of the algorithm, e.g. {"hidden": 64} of "solo".
    steps
        Number of updates.
    batch_size
        Query rows of an update.
    context
        Context rows of each class and domain in an update.
    learning_rate
        Of Adam. None: 0.03 for a linear classifier ("solo_plus", "erm"), else 0.003.
    weight_decay
        Of Adam.
    n_domains
        Number of domains to make where none are given.
    random_state
        Seed; the same number gives the same model.
    """

    def __init__(
        self,
        *,
        algorithm: str = "solo_plus",
        arguments: dict[str, Any] | None = None,
        steps: int = 200,
        batch_size: int = 32,
        context: int = 4,
        learning_rate: float | None = None,
        weight_decay: float = 5e-4,
        n_domains: int = 3,
        random_state: int = 0,
    ) -> None:
        self.algorithm = algorithm
        self.arguments = arguments
        self.steps = steps
        self.batch_size = batch_size
        self.context = context
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.n_domains = n_domains
        self.random_state = random_state

    def fit(
        self, X: ArrayLike, y: ArrayLike, domains: ArrayLike | None = None, **unknown: Any
    ) -> "SoloClassifier":
        """Trains on rows of several domains; returns the classifier itself.

        There is no `sample_weight`: an update draws its rows by domain and class.
        """
        _refuse(unknown)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(str(unknown_name("algorithm", self.algorithm, ALGORITHMS)))
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("SoloClassifier needs at least two classes; the data has one class.")
        source = self._source(np.asarray(X), labels.astype(np.int64), domains)
        with unchanged_generators():
            self.model_ = self._train(source)
        self.domains_ = list(source.domain_names)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Returns class probabilities (rows, classes), averaged over sampled classifiers."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.inference_mode():
            rows = torch.tensor(X)  # (rows, features)
            parts = rows.split(inference_batch_size(rows.shape[1]))
            result: NDArray[np.float64] = torch.cat(
                [self.model_.probabilities(part) for part in parts]
            ).numpy()
        try:
            check_finite(result)
        except NotFiniteError as error:
            raise ValueError(str(error)) from error
        return result

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Returns the most probable class of each row."""
        probabilities = self.predict_proba(X)
        chosen: NDArray[Any] = self.classes_[probabilities.argmax(1)]
        return chosen

    def _source(
        self, X: NDArray[np.float32], labels: NDArray[np.int64], domains: ArrayLike | None
    ) -> SourceData:
        names: tuple[str, ...] = ("all",)
        numbers = np.zeros(len(labels), dtype=np.int64)
        if domains is not None:
            given = np.asarray(domains)
            if given.shape != labels.shape:
                raise ValueError(
                    f"domains must have one entry per row: {given.shape} for {labels.shape}."
                )
            unique, inverse = np.unique(_named(given), return_inverse=True)
            names, numbers = tuple(str(name) for name in unique), inverse.astype(np.int64)
        everything = np.arange(len(labels))
        stored = StoredFeatures([X], np.zeros((len(X), 1), np.int64), everything, [""] * len(X))
        train = LabelledImages(stored, labels, numbers, names)
        empty = train.subset([])
        source = SourceData(train, empty, empty, tuple(map(str, self.classes_)), "photo")
        return source if len(names) > 1 else self._pseudo_domains(source, X)

    def _pseudo_domains(self, source: SourceData, X: NDArray[np.float32]) -> SourceData:
        count = min(self.n_domains, len(X))
        clustered = cluster_domains(
            source, X, X[:0], count, seed=self.random_state, min_images=self.context
        )
        if _shares_classes(clustered):
            return clustered
        # Where the clusters are the classes, no class is in two domains: divide at random instead.
        return random_domains(source, count, seed=self.random_state)

    def _train(self, source: SourceData) -> Algorithm:
        """Trains to the last step: a few hundred rows leave none to validate on."""
        try:
            arguments = checked_arguments(self.algorithm, self.arguments or {})
        except UserError as error:
            raise ValueError(str(error)) from error
        torch.manual_seed(derive(self.random_state, "generators"))
        features = source.train.images.take(np.arange(len(source.train)))
        algorithm = build_algorithm(
            self.algorithm,
            Standardised(features),
            num_classes=len(source.classes),
            num_domains=len(source.domain_names),
            **arguments,
        )
        algorithm.domain_images = source.train.domain_sizes
        y, domain = (
            torch.from_numpy(source.train.labels),
            torch.from_numpy(source.train.domains),
        )
        everything = Batch(features, y, domain)
        if algorithm.closed_form:  # calibrated on rows that are classified without their domain
            algorithm.eval().solve(lambda: [everything], lambda: [everything])
        else:
            self._fit_steps(algorithm, source)
        algorithm.eval()
        with torch.no_grad():
            algorithm.finalize([everything])
        return algorithm.double().requires_grad_(
            False
        )  # float64: results hardly depend on the batch size

    def _fit_steps(self, algorithm: Algorithm, source: SourceData) -> None:
        """Trains an algorithm by steps."""
        rate = 0.03 if self.algorithm in _LINEAR else 0.003
        rate = rate if self.learning_rate is None else self.learning_rate
        cells = source.train.domains * len(source.classes) + source.train.labels
        smallest = int(np.unique(cells, return_counts=True)[1].min())
        try:
            sampler = EpisodeSampler(
                source.train,
                context=min(self.context, smallest),
                queries=self.batch_size,
                seed=self.random_state,
                classes=source.classes,
            )
        except UserError as error:
            raise ValueError(str(error)) from error
        schedule = Schedule(
            self.steps, self.steps, rate, rate, self.weight_decay, self.random_state,
        )  # fmt: skip
        fabric = Fabric(accelerator="cpu", devices=1)
        loader = EpisodeLoader(source.train, sampler, workers=1)
        state = start(fabric, algorithm, schedule)
        for _ in fit(fabric, state, loader, unaugmented, schedule):
            pass


def _refuse(unknown: dict[str, Any]) -> None:
    """Raises `ValueError` for sample weights, and `TypeError` for other arguments of `fit`.

    A `sample_weight` among the parameters of `fit` would tell scikit-learn that it is supported.
    """
    for name, value in unknown.items():
        if name != "sample_weight":
            raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ValueError(
                "SoloClassifier does not support sample_weight: an update draws its rows by domain "
                "and class, not by weight. Leave it out, or repeat rows in X, y and domains."
            )


def _named(domains: NDArray[Any]) -> NDArray[Any]:
    """Returns the domain of each row; raises `ValueError` if one is missing (None, NaN)."""
    names = domains.tolist()
    missing = [i for i, name in enumerate(names) if is_missing(name)]
    if missing:
        raise ValueError(
            f"domains has {names[missing[0]]!r} in row {missing[0]} ({len(missing)} such row(s)): "
            "give every row a domain, or none to any (domains=None)."
        )
    if domains.dtype == object and len({type(name) for name in names}) > 1:
        return domains.astype(str)  # several types have no order
    return domains


def _shares_classes(source: SourceData) -> bool:
    """Returns whether every class is in at least two domains."""
    pairs = np.unique(np.stack([source.train.labels, source.train.domains]), axis=1)
    counts = np.bincount(pairs[0], minlength=len(source.classes))
    return bool((counts >= 2).all())
