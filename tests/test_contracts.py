"""What every entry of every registry promises, on toy data."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric

from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS, build_algorithm
from solodg.data import DATASETS, DomainDataset, Loading
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import to_unit
from solodg.models.backbones import build_backbone
from solodg.runs import checkpoint
from solodg.runs.config import RunConfig
from solodg.runs.defaults import algorithm_arguments, resolve
from solodg.runs.fit import Schedule, build_optimizer, fit, start
from solodg.runs.model_info import ModelInfo
from solodg.runs.open_parts import candidates
from solodg.types import Batch, Episode

VARIANTS = [(name, variant) for name, kind in ALGORITHMS.items() for variant in kind.variants]
TRAINED = [(name, variant) for name, variant in VARIANTS if not ALGORITHMS[name].is_closed_form({})]


def configured(name: str, variant: str) -> RunConfig:
    given = {"dataset": "toy", "backbone": "small_cnn", "algorithm": name, "variant": variant}
    config = resolve(RunConfig(**given, pretrained=(name, variant) not in TRAINED))
    return candidates(config, None).all_parts(config) if config.open_parts else config


def build(name: str, variant: str, num_classes: int = 3, seed: int = 0):
    """As `solodg train` builds it from random weights, with what its recipe adds."""
    torch.manual_seed(seed)
    config = configured(name, variant)
    backbone = build_backbone(
        "small_cnn", channels=3, image_size=32, image_norm=config.image_norm,
        pose=config.pose == "on",
    )  # fmt: skip
    for norm in backbone.modules():  # no two alike, as after training
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            torch.nn.init.normal_(norm.bias, std=0.1)
    arguments = algorithm_arguments(config)
    return build_algorithm(name, backbone, num_classes=num_classes, num_domains=3, **arguments)


@cache
def toy_data() -> DomainDataset:
    return DATASETS["toy"].load(Loading(Path("nowhere"), image_size=32, channels=3))


@cache
def episodes(count: int, context: int = 3, queries: int = 8) -> list[Episode]:
    train = toy_data().leave_out(["sky"]).train
    sampler = EpisodeSampler(train, context=context, queries=queries, seed=0)
    loader = EpisodeLoader(train, sampler)
    return [
        Episode(*(b._replace(x=to_unit(b.x)) for b in e[:2]), e.num_context)
        for e in loader.episodes(0, count)
    ]


def finalized(name: str, variant: str):
    """A copy, which the caller may change."""
    return deepcopy(_finalized(name, variant))


@cache
def _finalized(name: str, variant: str):
    algorithm = build(name, variant)
    for episode in episodes(2):  # BatchNorm has statistics, noise has been drawn
        algorithm.train().losses(episode)
    source = toy_data().leave_out(["sky"])
    if algorithm.closed_form:
        algorithm.eval().solve(lambda: [inputs(source.train)], lambda: [inputs(source.val)])
    algorithm.eval().finalize([inputs(source.train.balanced(10, 0))])
    return algorithm


@cache
def target_images() -> torch.Tensor:
    return inputs(toy_data().targets(["sky"])["sky"]).x


def inputs(part) -> Batch:
    batch = next(part.batches(10_000))
    return batch._replace(x=to_unit(batch.x))


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_one_image_alone_equals_its_row_in_a_batch_of_64(name: str, variant: str) -> None:
    algorithm = finalized(name, variant)
    x = target_images()[:64]
    with torch.inference_mode():
        for predict in (algorithm, algorithm.probabilities):
            together = predict(x)
            alone = torch.cat([predict(x[i : i + 1]) for i in range(64)])
            torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_training_lowers_the_loss_and_reaches_every_parameter(name: str, variant: str) -> None:
    algorithm = build(name, variant).train()
    steps = 60 if name == "solo_code" else 30  # its pose is learned on the way
    schedule = Schedule(steps, steps, 3e-3, 3e-3, 0.0, 0)
    optimizer = build_optimizer(algorithm, schedule)
    values, reached = [], set()
    trained = {name for name, p in algorithm.named_parameters() if p.requires_grad}
    wanted = 1.0 if variant == "literal" else 0.5  # see docs/method.md

    def done() -> bool:  # a pose network is trained beforehand, by runs.pose_training
        fell = len(values) >= 10 and sum(values[-5:]) < wanted * sum(values[:5])
        return fell and trained <= reached

    for episode in episodes(steps, context=2, queries=6):
        losses = algorithm.losses(episode)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        reached |= {
            name
            for name, p in algorithm.named_parameters()
            if p.grad is not None and p.grad.count_nonzero()
        }
        # A disc looks the same rotated: where there is a class loss, that must fall.
        (told, *_) = [losses[n] for n in ("class", "posterior_ce", "loss") if n in losses]
        values.append(told.item())
        if done():
            break
    assert done(), (trained - reached, values)


class Listed:
    """Episodes from a list."""

    def __init__(self, listed: list[Episode]) -> None:
        self.listed = listed

    def episodes(self, start: int, stop: int, rank: int = 0):
        yield from self.listed[start:stop]


@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_linear_steps_train_all_but_the_backbone(name: str, variant: str) -> None:
    algorithm = build(name, variant)
    schedule = Schedule(4, 4, 1e-2, 1e-2, 0.1, 0, linear_steps=2)
    before = {n: p.detach().clone() for n, p in algorithm.named_parameters()}
    fabric, loader = Fabric(accelerator="cpu", devices=1), Listed(episodes(4, 2, 6))
    state = start(fabric, algorithm, schedule)
    for step, _ in fit(fabric, state, loader, lambda x, generator: x, schedule):
        moved = {n for n, p in algorithm.named_parameters() if not torch.equal(p, before[n])}
        of_backbone = {n for n in moved if n.startswith("backbone.")}
        assert moved - of_backbone
        assert bool(of_backbone) == (step > 2)


@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_training_works_with_a_single_query_and_a_single_context_image(name, variant) -> None:
    algorithm = build(name, variant).train()
    losses = algorithm.losses(episodes(1, context=1, queries=1)[0])
    losses["loss"].backward()
    assert torch.isfinite(losses["loss"])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_saved_model_predicts_the_same_bit_for_bit(tmp_path, name, variant) -> None:
    algorithm, config = finalized(name, variant), configured(name, variant)
    info = ModelInfo(
        algorithm=name, variant=variant, arguments=algorithm_arguments(config),
        image_norm=config.image_norm, pose=config.pose == "on",
        backbone="small_cnn", channels=3, image_size=32, classes=list(toy_data().classes),
        source_domains=["ash", "clay", "moss"], dataset="toy",
    )  # fmt: skip
    checkpoint.save_info(tmp_path, info)
    checkpoint.save_weights(tmp_path, algorithm, step=1, validation={})
    loaded, loaded_info = checkpoint.load(tmp_path)
    x = target_images()[:9]
    assert loaded_info == info
    assert torch.equal(loaded(x), algorithm(x))
    assert torch.equal(loaded.probabilities(x), algorithm.probabilities(x))


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_same_seed_gives_the_same_losses(name: str, variant: str) -> None:
    def run() -> list[float]:
        algorithm = build(name, variant, seed=5).train()
        torch.manual_seed(3)
        return [algorithm.losses(e)["loss"].item() for e in episodes(2)]

    assert run() == run()


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_algorithms_are_documented_and_their_variants_build(name: str, variant: str) -> None:
    assert len(ALGORITHMS[name].__doc__ or "") > 20
    assert configured(name, variant).algorithm == name


PAIRS = [
    (name, algorithm)
    for name, kind in ADAPTERS.items()
    for algorithm in ([kind.trained_by] if kind.trained_by else ["erm", "solo", "solo_plus"])
]


@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_adapters_are_single_sample_exactly_where_they_say_so(name, algorithm) -> None:
    adapter = ADAPTERS[name](finalized(algorithm, "default")).eval()
    x = target_images()[:5]
    with torch.inference_mode():  # as evaluation calls it
        together = adapter(x)
        adapter.reset()
        alone = []
        for i in range(5):
            alone.append(adapter(x[i : i + 1]))
            adapter.reset()
    if adapter.single_sample:
        torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=1e-5)
    else:  # a batch teaches it something
        assert (torch.cat(alone) - together).abs().max() > 1e-6


@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_reset_restores_an_adapter_bit_for_bit(name, algorithm) -> None:
    adapter = ADAPTERS[name](finalized(algorithm, "default")).eval()
    before = {k: v.clone() for k, v in adapter.state_dict().items()}
    flags = [p.requires_grad for p in adapter.parameters()]
    x = target_images()
    with torch.inference_mode():
        first = [adapter(x[:4]), adapter(x[4:8])]
        adapter(torch.full_like(x[:4], torch.nan))  # whatever came
        adapter.reset()
        assert all(torch.equal(v, before[k]) for k, v in adapter.state_dict().items())
        assert [p.requires_grad for p in adapter.parameters()] == flags
        assert all(p.grad is None for p in adapter.parameters())
        again = [adapter(x[:4]), adapter(x[4:8])]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_adapters_take_one_image_and_give_probabilities(name, algorithm) -> None:
    adapter = ADAPTERS[name](finalized(algorithm, "default")).eval()
    with torch.inference_mode():
        p = adapter.probabilities(target_images()[:1])
    assert p.shape == (1, 3)
    torch.testing.assert_close(p.sum(1), torch.ones(1))


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_says_what_it_is_and_how_to_get_it(name: str, tmp_path) -> None:
    spec = DATASETS[name]
    assert spec.name == name
    assert len(spec.domains) >= 2
    assert set(spec.default_targets) <= set(spec.domains)
    assert spec.how_to_get
    json.dumps(spec.find(tmp_path))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_label_smoothing_is_torchs_and_knows_of_absent_classes(smoothing: float) -> None:
    algorithm = build("erm", "default", num_classes=5)
    algorithm.label_smoothing = smoothing
    logits, y = torch.randn(20, 5), torch.randint(0, 4, (20,))
    plain = torch.nn.functional.cross_entropy(logits, y, label_smoothing=smoothing)
    torch.testing.assert_close(algorithm.cross_entropy(logits, y), plain)
    absent = logits.clone()
    absent[:, 4] = -torch.inf
    four = torch.nn.functional.cross_entropy(logits[:, :4], y, label_smoothing=smoothing)
    torch.testing.assert_close(algorithm.cross_entropy(absent, y), four)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_method_takes_label_smoothing(name: str, variant: str) -> None:
    (episode,) = episodes(1)
    values = []
    for smoothing in (0.0, 0.3):
        algorithm = build(name, variant).train()
        algorithm.label_smoothing = smoothing
        torch.manual_seed(1)
        values.append(algorithm.losses(episode)["loss"].item())
    assert values[0] != values[1]
