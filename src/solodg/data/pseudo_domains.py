"""Source domains where none are annotated: a random division, or clusters of features.

The paper's tables 2 and 8: the larger the shift between the made domains, the better.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from solodg.data.domains import Ints, SourceData
from solodg.errors import UserError
from solodg.seeding import derive, numpy_generator


def random_domains(source: SourceData, count: int, *, seed: int) -> SourceData:
    """Every image goes to one of `count` domains by lot, the same share of every class."""
    generator = numpy_generator(seed, "pseudo-domains")

    def deal(labels: Ints) -> Ints:
        domains = np.zeros(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            domains[members] = np.arange(len(members)) % count
        return domains

    return _relabelled(source, deal(source.train.labels), deal(source.val.labels), "random", count)


def cluster_domains(
    source: SourceData,
    train_features: NDArray[np.float32],
    val_features: NDArray[np.float32],
    count: int,
    *,
    seed: int,
    min_images: int,
) -> SourceData:
    """k-means of standardised features; validation images join the nearest centre.

    A class with fewer than `min_images` in a cluster could not be its context: those images join
    the cluster where their class is most frequent.
    """
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
        home = int(counts.argmax())
        for cluster in np.flatnonzero((counts > 0) & (counts < min_images)):
            train[(train == cluster) & (source.train.labels == label)] = home
            val[(val == cluster) & (source.val.labels == label)] = home
    return _relabelled(source, train, val, "cluster", count)


def _relabelled(source: SourceData, train: Ints, val: Ints, prefix: str, count: int) -> SourceData:
    names = tuple(f"{prefix}-{i}" for i in range(count))
    return replace(
        source,
        train=replace(source.train, domains=train, domain_names=names),
        val=replace(source.val, domains=val, domain_names=names),
    )
