"""The fast exact form against a plain one, written from the paper, in float64."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plain import plain_posterior
from solodg.algorithms.solo import Solo
from solodg.models.extractor import ReadyFeatures
from solodg.types import Batch, Episode

D, S, C, K = 5, 7, 3, 4  # embedding, style, classes, context


def build(**arguments) -> Solo:
    torch.manual_seed(1)
    arguments = {"hidden": 6, "source_samples": 3, "posterior_samples": 4, "prior_samples": 2,
                 "kl_weight": 0.3, "kl_warmup": 0} | arguments  # fmt: skip
    solo = Solo(ReadyFeatures(D, S), num_classes=C, **arguments)
    for parameter in solo.parameters():  # away from the zero start, where much would be equal
        torch.nn.init.normal_(parameter, std=0.5)
    return solo


def make_episode(domains: int = 3, queries: int = 6, seed: int = 0, lacking=()) -> Episode:
    """Context of K images per class and domain; `lacking` are (domain, class) without images."""
    generator = torch.Generator().manual_seed(seed)
    cells = [(d, c) for d in range(domains) for c in range(C) if (d, c) not in lacking]

    def batch(rows: list[tuple[int, int]]) -> Batch:
        x = torch.randn(len(rows), D + S, generator=generator)
        d, c = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Batch(x + 0.3 * c[:, None], c, d)

    target = domains - 1
    source = [(d, c) for d, c in cells if d != target for _ in range(K)]
    context = [(d, c) for d, c in cells if d == target for _ in range(K)]
    classes = [c for d, c in cells if d == target]
    queried = [(target, classes[i % len(classes)]) for i in range(queries)]
    return Episode(batch(source), batch(context + queried), len(context))


def plain_losses(solo: Solo, episode: Episode) -> dict[str, Tensor]:
    """Returns equation 7 in loops, with the plain posterior and explicit weights.

    The noise of a weight is chosen along the direction in which it moves its logit, so that the
    sampled weights give exactly the sampled logits of the fast form.
    """
    merged = episode.merged
    z, style = merged.x.split([D, S], 1)
    posterior, prior, divergence, count = 0.0, 0.0, 0.0, 0
    for queries, source, target in plain_shifts(solo, episode, merged):
        s_centres, s_classes = plain_centres(z, merged, source)
        t_centres, t_classes = plain_centres(z, merged, target)
        queries = [b for b in queries if int(merged.y[b]) in s_classes]
        if not queries:
            continue
        base = solo.base.weight if solo.base is not None else torch.zeros(C, D)
        if solo.posterior == "hierarchical":
            written = solo.source_prior(s_centres)
            noise = torch.randn(solo.source_samples, C, D)
            codes = torch.stack([written.mean + written.scale * one for one in noise])  # (L, C, D)
        else:
            codes = s_centres[None]
        p = solo.amortiser(t_centres)
        q_noise = torch.randn(len(queries), solo.posterior_samples, C)
        p_noise = torch.randn(len(queries), solo.prior_samples, C) if solo.prior_weight else None
        for row, b in enumerate(queries):
            q_mean, q_scale = posterior_of(solo, style[b], codes)
            for m in range(solo.posterior_samples):
                w = plain_sample(q_mean, q_scale, z[b], q_noise[row, m]) + base
                posterior = posterior + plain_ce(w, z[b], merged.y[b], s_classes) / q_noise.shape[1]
            if p_noise is not None:
                for n in range(solo.prior_samples):
                    w = plain_sample(p.mean, p.scale, z[b], p_noise[row, n]) + base
                    prior = prior + plain_ce(w, z[b], merged.y[b], t_classes) / p_noise.shape[1]
            for c in set(s_classes) & set(t_classes):
                q_c = Independent(Normal(q_mean[c], q_scale[c]), 1)
                p_c = Independent(Normal(p.mean[c], p.scale[c]), 1)
                divergence = divergence + kl_divergence(q_c, p_c)
            count += 1
    kl_scale = 1 if solo.kl_reduction == "sum" else 1 / count
    loss = posterior / count + solo.prior_weight * prior / count
    return {
        "loss": loss + solo.kl_weight * kl_scale * divergence,
        "posterior_ce": posterior / count,
        "kl": divergence / count,
    }


def plain_shifts(solo: Solo, episode: Episode, merged: Batch) -> Iterator[tuple[list, list, list]]:
    """Yields queries, S' and T' of each meta-target shift, as positions in the merged episode."""
    everyone, start = list(range(len(merged.y))), len(episode.source.y)
    if not solo.meta_learning:
        yield everyone, everyone, everyone
    elif solo.turns == "all":
        for domain in sorted(set(merged.domain.tolist())):
            inside = [b for b in everyone if int(merged.domain[b]) == domain]
            yield inside, [b for b in everyone if b not in inside], inside
    else:
        end = start + episode.num_context
        yield everyone[end:], everyone[:start], everyone[start:end]


def plain_centres(z: Tensor, batch: Batch, rows: list[int]) -> tuple[Tensor, list[int]]:
    """Mean over domains of the mean per class, and which classes there are."""
    centres = []
    for c in range(C):
        per_domain = []
        for d in sorted(set(batch.domain[rows].tolist())):
            own = [z[b] for b in rows if int(batch.y[b]) == c and int(batch.domain[b]) == d]
            if own:
                per_domain.append(torch.stack(own).mean(0))
        centres.append(torch.stack(per_domain).mean(0) if per_domain else None)
    present = [c for c in range(C) if centres[c] is not None]
    return torch.stack([torch.zeros(D) if x is None else x for x in centres]), present


def posterior_of(solo: Solo, style: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and scale (C, D) for one image; the invariant posterior reads the centres."""
    if solo.posterior == "invariant":
        (centres,) = codes
        written = solo.amortiser(centres)
        return written.mean, written.scale
    q = plain_posterior(solo, style[None], codes)
    return q.mean[0], q.scale[0]


def plain_sample(mean: Tensor, scale: Tensor, z: Tensor, noise: Tensor) -> Tensor:
    direction = scale * z / (scale * z).norm(dim=1, keepdim=True)
    return mean + scale * direction * noise[:, None]


def plain_ce(w: Tensor, z: Tensor, y: Tensor, present: list[int]) -> Tensor:
    logits = torch.stack([w[c] @ z for c in present])
    return torch.logsumexp(logits, 0) - logits[present.index(int(y))]


CASES = {
    "default": {},
    **{name: arguments for name, arguments in Solo.variants.items() if name != "default"},
    "one meta-target": {"turns": "one"},
    "invariant, one meta-target": {"turns": "one", "posterior": "invariant"},
    "concatenation without base": {"posterior": "concatenation", "base": "none"},
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("lacking", [(), ((0, 1),), ((2, 0),), ((0, 2), (1, 2))], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_fast_form_equals_plain_form(case: str, lacking: tuple) -> None:
    solo = build(**CASES[case])
    if case == "literal":
        solo.kl_weight = 0.3
    episode = make_episode(lacking=lacking)
    torch.manual_seed(7)
    expected = plain_losses(solo, episode)
    wanted = torch.autograd.grad(expected["loss"], list(solo.parameters()), allow_unused=True)
    torch.manual_seed(7)
    got = solo.losses(episode)
    gradients = torch.autograd.grad(got["loss"], list(solo.parameters()), allow_unused=True)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-10, rtol=1e-10, msg=name)
    for (name, _), a, b in zip(solo.named_parameters(), gradients, wanted, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.usefixtures("float64")
def test_the_loss_is_the_negative_bound_of_equation_7() -> None:
    """With many samples, the loss tends to expectations that torch.distributions computes."""
    solo = build(posterior="invariant", turns="one", posterior_samples=40_000, prior_samples=40_000)
    episode = make_episode(queries=1)
    merged = episode.merged
    torch.manual_seed(0)
    got = solo.losses(episode)
    z, y = merged.x[-1, :D], int(merged.y[-1])
    rows = list(range(len(merged.y) - 1))
    q, p = (
        Normal(*solo.amortiser(plain_centres(merged.x[:, :D], merged, own)[0]))
        for own in (rows[: 2 * C * K], rows[2 * C * K :])
    )

    def expected_ce(classifier: Normal) -> Tensor:
        weights = classifier.sample((200_000,)) + solo.base.weight  # (M, C, D)
        return -torch.log_softmax(weights @ z, -1)[:, y].mean()

    divergence = kl_divergence(Independent(q, 2), Independent(p, 2))
    expected = expected_ce(q) + expected_ce(p) + solo.kl_weight * divergence
    torch.testing.assert_close(got["kl"], divergence, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(got["loss"], expected, atol=0.03, rtol=0.01)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_permuting_classes_permutes_logits(case: str) -> None:
    solo, episode = build(**CASES[case]), make_episode()
    order = torch.tensor([2, 0, 1])  # class c becomes order[c]
    solo.finalize([episode.merged])
    before = solo(episode.target.x)
    permuted = build(**CASES[case])
    if permuted.base is not None:
        with torch.no_grad():
            permuted.base.weight[order] = solo.base.weight.clone()
    merged = episode.merged
    permuted.finalize([merged._replace(y=order[merged.y])])
    torch.testing.assert_close(permuted(episode.target.x)[:, order], before, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_written_classifier_times_the_embedding(case: str) -> None:
    solo, episode = build(**CASES[case]), make_episode()
    solo.finalize([episode.merged])
    written = solo.classifiers(episode.target.x)
    expected = torch.einsum("bcd,bd->bc", written.mean, episode.target.x[:, :D])
    torch.testing.assert_close(solo(episode.target.x), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_prediction_is_the_plain_posterior_at_the_mean_source_classifier() -> None:
    solo, episode = build(), make_episode()
    merged = episode.merged
    solo.finalize([merged])
    centres, _ = plain_centres(merged.x[:, :D], merged, list(range(len(merged.y))))
    codes = solo.source_prior(centres).mean[None]
    for b in range(3):
        mean, _ = posterior_of(solo, merged.x[b, D:], codes)
        expected = (mean + solo.base.weight) @ merged.x[b, :D]
        torch.testing.assert_close(solo(merged.x[b : b + 1])[0], expected, atol=1e-12, rtol=1e-12)


def test_finalize_does_not_depend_on_batches() -> None:
    solo, merged = build(), make_episode().merged
    solo.finalize([merged])
    whole = solo.source_centres.clone()
    solo.finalize([Batch(*(t[i : i + 5] for t in merged)) for i in range(0, len(merged.y), 5)])
    torch.testing.assert_close(solo.source_centres, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("posterior", ["hierarchical", "concatenation", "invariant"])
def test_a_model_that_was_not_finalized_predicts_nan(posterior: str) -> None:
    solo, x = build(posterior=posterior), make_episode().target.x
    assert torch.isnan(solo(x)).all()
    assert torch.isnan(solo.probabilities(x)).all()


@pytest.mark.parametrize("arguments", [{"source_samples": 0}, {"test_samples": 1}, {"hidden": 0}])
def test_impossible_numbers_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="at least"):
        build(**arguments)


@pytest.mark.parametrize(
    ("hidden", "embedding_dim", "width"),
    [(None, 300, 256), (None, 20, 20), ("embedding", 300, 300), (7, 300, 7)],
)
def test_the_hidden_width_is_a_number_or_that_of_the_embedding(
    hidden: int | str | None, embedding_dim: int, width: int
) -> None:
    solo = Solo(ReadyFeatures(embedding_dim, S), num_classes=C, hidden=hidden)
    for layer in (solo.amortiser.first, solo.source_prior.first, solo.combine):
        assert layer.out_features == width


def test_the_literal_variant_has_the_authors_width() -> None:
    solo = Solo(ReadyFeatures(512, S), num_classes=C, **Solo.variants["literal"])
    assert solo.amortiser.first.out_features == 512


def test_a_class_that_no_source_has_is_never_predicted() -> None:
    solo, merged = build(), make_episode().merged
    keep = merged.y != 1
    solo.finalize([Batch(*(t[keep] for t in merged))])
    assert torch.isinf(solo(merged.x)[:, 1]).all()
    assert (solo.probabilities(merged.x)[:, 1] == 0).all()


def test_the_untrained_classifier_is_its_linear_base() -> None:
    torch.manual_seed(0)
    solo = Solo(ReadyFeatures(D, S), num_classes=C)
    episode = make_episode()
    solo.finalize([episode.merged])
    torch.testing.assert_close(solo(episode.target.x), solo.base(episode.target.x[:, :D]))


def test_the_weight_of_the_divergence_grows_until_the_warm_up_ends() -> None:
    solo = build(kl_warmup=2, kl_weight=0.5)
    weights = []
    for _ in range(3):
        solo.train().losses(make_episode())
        weights.append(float(solo._kl_factor()))
    assert weights == [0.25, 0.5, 0.5]


def test_sampled_probabilities_sum_to_one_and_are_less_certain_than_the_mean() -> None:
    solo, episode = build(), make_episode()
    solo.finalize([episode.merged])
    sampled = solo.probabilities(episode.target.x)
    torch.testing.assert_close(sampled.sum(1), torch.ones(len(sampled)))
    mean_confidence = solo(episode.target.x).softmax(1).max(1).values.mean()
    assert sampled.max(1).values.mean() < mean_confidence
