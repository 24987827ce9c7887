"""The scikit-learn estimator, by scikit-learn's own rules."""

import pickle

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import has_fit_parameter

from solodg import SoloClassifier
from solodg.algorithms import ALGORITHMS


def shifted(count: int = 60, seed: int = 0):
    """Three classes in four domains, each domain moved and stretched in its own way."""
    generator = np.random.default_rng(seed)
    X, y, domains = [], [], []
    centres = generator.normal(size=(3, 6)) * 3
    for domain in range(4):
        move, stretch = generator.normal(size=6), 1 + 0.2 * generator.normal(size=6)
        for label in range(3):
            X.append((centres[label] + generator.normal(size=(count, 6))) * stretch + move)
            y += [("cat", "dog", "owl")[label]] * count
            domains += [f"site-{domain}"] * count
    return np.concatenate(X), np.array(y), np.array(domains)


def test_scikit_learn_accepts_it() -> None:
    check_estimator(SoloClassifier(steps=12, batch_size=16, learning_rate=0.05))


def test_it_learns_and_names_what_it_learned() -> None:
    X, y, domains = shifted()
    model = SoloClassifier().fit(X, y, domains=domains)
    assert model.score(X, y) > 0.95
    assert model.classes_.tolist() == ["cat", "dog", "owl"]
    assert model.domains_ == [f"site-{i}" for i in range(4)]
    p = model.predict_proba(X[:7])
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(X[:7]))


def test_the_same_seed_the_same_model_and_no_other_random_state_is_touched() -> None:
    X, y, domains = shifted(20)
    import torch

    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    first = SoloClassifier(steps=20).fit(X, y, domains=domains).predict_proba(X)
    assert torch.equal(torch.rand(1), before)
    again = SoloClassifier(steps=20).fit(X, y, domains=domains).predict_proba(X)
    other = SoloClassifier(steps=20, random_state=1).fit(X, y, domains=domains).predict_proba(X)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_it_clones_and_pickles() -> None:
    X, y, domains = shifted(20)
    model = SoloClassifier(steps=20, algorithm="solo", arguments={"posterior": "invariant"})
    assert clone(model).get_params() == model.get_params()
    model.fit(X, y, domains=domains)
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict_proba(X), model.predict_proba(X))


def test_a_row_is_judged_alone() -> None:
    X, y, domains = shifted(20)
    model = SoloClassifier(steps=20).fit(X, y, domains=domains)
    alone = np.concatenate([model.predict_proba(X[i : i + 1]) for i in range(10)])
    np.testing.assert_allclose(alone, model.predict_proba(X)[:10], atol=1e-12)


def test_leave_one_group_out_in_a_pipeline_with_routing() -> None:
    X, y, domains = shifted(30)
    with sklearn.config_context(enable_metadata_routing=True):
        solo = SoloClassifier(steps=40, learning_rate=0.01).set_fit_request(domains=True)
        pipeline = make_pipeline(StandardScaler(), solo)
        scores = cross_val_score(
            pipeline, X, y, cv=LeaveOneGroupOut(), params={"domains": domains, "groups": domains}
        )
    plain = cross_val_score(
        make_pipeline(StandardScaler(), LogisticRegression()), X, y,
        cv=LeaveOneGroupOut(), groups=domains,
    )  # fmt: skip
    assert len(scores) == 4
    assert scores.mean() > plain.mean() - 0.1


def test_domains_are_made_where_none_are_given() -> None:
    X, y, domains = shifted(30)
    for given in (None, np.zeros(len(y))):
        model = SoloClassifier(steps=40, learning_rate=0.01, n_domains=2).fit(X, y, domains=given)
        assert len(model.domains_) == 2
        assert model.score(X, y) > 0.8
    assert domains is not None


NEED_IMAGES = {"dson", "jigen", "l2a_ot", "miro", "mixstyle", "ttt"}


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - NEED_IMAGES))
def test_other_algorithms_work_on_features_too(algorithm: str) -> None:
    X, y, domains = shifted(20)
    model = SoloClassifier(algorithm=algorithm, steps=60, learning_rate=0.01).fit(
        X, y, domains=domains
    )
    assert model.score(X, y) > 0.9


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"algorithm": "sole"}, "solo"), ({"arguments": {"posteriour": 1}}, "posteriour")],
)
def test_mistakes_are_told(values: dict, reason: str) -> None:
    X, y, domains = shifted(10)
    with pytest.raises((ValueError, TypeError), match=reason):
        SoloClassifier(**values).fit(X, y, domains=domains)


def test_domains_must_be_as_many_as_rows() -> None:
    X, y, _ = shifted(10)
    with pytest.raises(ValueError, match="one entry per row"):
        SoloClassifier().fit(X, y, domains=[1, 2])


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT])
def test_a_missing_domain_is_told(missing) -> None:
    X, y, domains = shifted(10)
    given = domains.astype(object)
    given[7] = missing
    with pytest.raises(ValueError, match=r"in row 7 \(1 such row"):
        SoloClassifier(steps=2).fit(X, y, domains=given)
    with pytest.raises(ValueError, match=r"in row 7 \(1 such row"):
        SoloClassifier(steps=2).fit(X, y, domains=pd.Series(given))


def test_a_number_among_names_is_a_domain() -> None:
    X, y, domains = shifted(10)
    given = [0 if domain == "site-0" else domain for domain in domains]
    model = SoloClassifier(steps=2).fit(X, y, domains=np.array(given, dtype=object))
    assert model.domains_ == ["0", "site-1", "site-2", "site-3"]


def test_sample_weights_are_refused_and_not_promised() -> None:
    X, y, domains = shifted(10)
    assert not has_fit_parameter(SoloClassifier(), "sample_weight")
    with pytest.raises(ValueError, match="does not support sample_weight"):
        SoloClassifier(steps=2).fit(X, y, domains=domains, sample_weight=np.ones(len(y)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sample_weights'"):
        SoloClassifier(steps=2).fit(X, y, domains=domains, sample_weights=None)
    model = SoloClassifier(steps=2).fit(X, y, domains=domains, sample_weight=None)
    assert model.domains_ == [f"site-{i}" for i in range(4)]


def test_the_default_is_a_linear_classifier_that_has_converged() -> None:
    generator = np.random.default_rng(0)
    y, sites = np.arange(240) % 3, np.arange(240) // 3 % 4
    X = generator.normal(size=(240, 8)) + 3 * np.eye(3, 8)[y]
    model = SoloClassifier().fit(X, y, domains=sites)
    assert type(model.model_).__name__ == "SoloPlus"
    plain = LogisticRegression().fit(X, y)
    assert model.score(X, y) == pytest.approx(plain.score(X, y), abs=0.03)
    with pytest.raises(ValueError, match=r"unknown argument of solo_plus .*--pose"):
        SoloClassifier(arguments={"frame": 2}).fit(X, y, domains=sites)
