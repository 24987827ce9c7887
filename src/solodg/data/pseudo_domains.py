"""Pseudo-domains, for data without annotated domains: a random division, or clusters of features.

In the paper (tables 2 and 8) clusters are better than a random division.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from solodg.data.domains import SourceData
from solodg.data.splits import Ints
from solodg.errors import UserError
from solodg.seeding import derive, numpy_generator


def random_domains(source: SourceData, count: int, *, seed: int) -> SourceData:
    """Divides the images at random into `count` domains with the same share of every class."""
    generator = numpy_generator(seed, "pseudo-domains")

    def divide(labels: Ints) -> Ints:
        domains = np.zeros(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            domains[members] = np.arange(len(members)) % count
        return domains

    return _relabelled(
        source, divide(source.train.labels), divide(source.val.labels), "random", count
    )


def cluster_domains(
    source: SourceData,
    train_features: NDArray[np.float32],
    val_features: NDArray[np.float32],
    count: int,
    *,
    seed: int,
    min_images: int,
) -> SourceData:
    """Divides the images by k-means of their standardised features, (N, D).

    Validation images join the nearest centre. Where a cluster has fewer than `min_images` of a
    class, too few for a context, they move to the cluster with most images of that class.
    """
    from sklearn.cluster import KMeans  # late: it takes seconds to import

    if len(train_features) < count:
        raise UserError(f"{len(train_features)} images cannot make {count} clusters.")
    mean, std = train_features.mean(0), train_features.std(0) + 1e-6
    kmeans = KMeans(count, n_init=4, random_state=derive(seed, "clusters") % 2**32)
    train = kmeans.fit_predict((train_features - mean) / std).astype(np.int64)
    val = np.zeros(0, dtype=np.int64)
    if len(val_features):
        val = kmeans.predict((val_features - mean) / std).astype(np.int64)
    for label in np.unique(source.train.labels):
        counts = np.bincount(train[source.train.labels == label], minlength=count)
        largest = int(counts.argmax())
        for cluster in np.flatnonzero((counts > 0) & (counts < min_images)):
            train[(train == cluster) & (source.train.labels == label)] = largest
            val[(val == cluster) & (source.val.labels == label)] = largest
    return _relabelled(source, train, val, "cluster", count)


def _relabelled(source: SourceData, train: Ints, val: Ints, prefix: str, count: int) -> SourceData:
    names = tuple(f"{prefix}-{i}" for i in range(count))
    return replace(
        source,
        train=replace(source.train, domains=train, domain_names=names),
        val=replace(source.val, domains=val, domain_names=names),
    )
