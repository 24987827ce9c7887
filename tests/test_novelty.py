"""Novelty, coverage and temperature: against plain oracles, and by properties."""

from pathlib import Path

import numpy as np
import pytest
import torch

from solodg.errors import UserError
from solodg.runs.coverage import coverage_curve, doubts
from solodg.runs.novelty import NOVELTY, Described, Novelty, load_novelty, save_novelty
from solodg.runs.predictions import Predictions
from solodg.runs.temperature import at_temperature, fit_temperature

RNG = np.random.default_rng(0)


def images(domains: int, count: int, spread: float) -> Described:
    """Images of domains whose styles lie `spread` apart."""
    domain = np.repeat(np.arange(domains), count)
    style = RNG.normal(size=(len(domain), 6)) + spread * RNG.normal(size=(domains, 6))[domain]
    labels = np.tile(np.arange(2), len(domain) // 2)
    return Described(RNG.normal(size=(len(domain), 8)) + 1, style, labels, domain)


def novelty_of(score: Novelty, found: Described) -> np.ndarray:
    result: np.ndarray = score([found.features()]).numpy()
    return result


def test_images_far_away_are_novel_and_training_images_are_not() -> None:
    train = images(4, 50, 2)
    score = Novelty.fit(train, images(4, 50, 2), leave_out=True)
    far = train._replace(embedding=-train.embedding, style=train.style + 50)
    assert (novelty_of(score, far) == 1).all()
    assert np.median(novelty_of(score, train)) < 0.5


def test_novelty_is_the_share_of_held_out_images_that_are_nearer() -> None:
    train = images(3, 40, 1)
    score = Novelty.fit(train, train, leave_out=True)
    sums = []
    for domain in range(3):
        rest = train.only(train.domains != domain)
        own = train.only(train.domains == domain)
        unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
        scale = rest.style.std(0)
        pairs = [
            (unit(own.embedding), unit(rest.embedding)),
            (own.style / scale, rest.style / scale),
        ]
        near = [np.sort(np.linalg.norm(a[:, None] - b, axis=2), axis=1)[:, 4] for a, b in pairs]
        sums.append(np.stack(near, 1))
    unit_lengths = np.mean([np.median(each, 0) for each in sums], 0)
    expected = np.quantile([(each / unit_lengths).sum(1) for each in sums], 0.5)
    assert score.quantiles[50].item() == pytest.approx(expected, rel=0.02)


def test_a_saved_score_is_the_same_and_a_missing_one_is_none(tmp_path: Path) -> None:
    assert load_novelty(tmp_path) is None
    train = images(3, 20, 1)
    score = Novelty.fit(train, train, leave_out=False)
    save_novelty(tmp_path, score)
    found = load_novelty(tmp_path)
    assert found is not None
    assert "no domain could be left out" in found.basis
    assert (novelty_of(found, train) == novelty_of(score, train)).all()
    (tmp_path / NOVELTY).write_bytes((tmp_path / NOVELTY).read_bytes()[:-3])
    with pytest.raises(UserError, match="damaged"):
        load_novelty(tmp_path)


def test_the_coverage_curve_counts_equal_doubts_alike() -> None:
    right = np.array([True, True, False, False])
    assert coverage_curve(right, np.array([0.1, 0.2, 0.3, 0.4])).tolist() == [1, 1, 2 / 3, 0.5]
    assert coverage_curve(right, np.full(4, 0.3)).tolist() == [0.5] * 4
    assert list(doubts(Predictions(np.full((4, 2), 0.5)))) == ["confidence"]


def test_the_temperature_of_scaled_logits_is_found() -> None:
    logits = torch.from_numpy(RNG.normal(size=(4000, 3)))
    p = logits.softmax(1).numpy()
    labels = np.array([RNG.choice(3, p=row) for row in p])
    sure = Predictions((3 * logits).softmax(1).numpy())
    found = fit_temperature(sure, labels)
    assert found.temperature == pytest.approx(3, rel=0.1)
    assert found.after["nll"] < found.before["nll"]
    assert np.allclose(at_temperature(sure, 3).probabilities, p)
