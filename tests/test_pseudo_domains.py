"""Domains made where none are annotated."""

import numpy as np
import pytest

from solodg.data.episodes import EpisodeSampler
from solodg.data.pseudo_domains import cluster_domains, random_domains
from solodg.errors import UserError


def test_a_random_division_gives_every_domain_the_same_share_of_every_class(toy) -> None:
    source = random_domains(toy.leave_out(["ash", "clay", "sky"]), 3, seed=0)
    cells = source.train.domains * 3 + source.train.labels
    assert np.ptp(np.bincount(cells, minlength=9)) <= 1
    assert source.domain_names == ("random-0", "random-1", "random-2")
    EpisodeSampler(source.train, context=2, queries=2, seed=0)(0)


def features_of(part) -> np.ndarray:
    return part.images.take(np.arange(len(part))).float().mean((2, 3)).numpy()


def test_clusters_of_colours_are_the_true_domains(toy) -> None:
    source = toy.leave_out(["sky"])
    made = cluster_domains(
        source, features_of(source.train), features_of(source.val), 3, seed=0, min_images=4
    )
    for true_part, made_part in ((source.train, made.train), (source.val, made.val)):
        pairs = set(zip(true_part.domains.tolist(), made_part.domains.tolist(), strict=True))
        assert len(pairs) == 3  # one cluster for each domain, and no other pair
    assert made.test is source.test


def test_a_class_too_rare_in_a_cluster_moves_to_where_it_is_frequent(toy) -> None:
    source = toy.leave_out(["sky"])
    features = np.zeros((len(source.train), 1), dtype=np.float32)
    bars = np.flatnonzero(source.train.labels == 0)
    features[source.train.labels == 2] = 100.0
    features[np.flatnonzero(source.train.labels == 1)[::2]] = 100.0  # half of the discs as well
    features[bars[:2]] = 100.0  # two bars lie among the rings
    made = cluster_domains(
        source, features, np.zeros((len(source.val), 1), np.float32), 2, seed=0, min_images=4
    )
    assert len(set(made.train.domains[bars].tolist())) == 1
    EpisodeSampler(made.train, context=4, queries=2, seed=0)(0)


def test_more_clusters_than_images_are_refused(toy) -> None:
    source = toy.leave_out(["sky"])
    with pytest.raises(UserError, match="cannot make"):
        cluster_domains(source, np.zeros((2, 1)), np.zeros((0, 1)), 3, seed=0, min_images=1)
