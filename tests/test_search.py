"""Random searches on held-out source domains: real small runs, killed and resumed, and choices."""

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

import forked
from conftest import write_images
from peer_models import on_images
from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.ranges import Choice, LogUniform, StepShare, Uniform
from solodg.bench.plan import Plan, read_plan
from solodg.bench.records import RECORDS, read_results
from solodg.bench.row import Row
from solodg.bench.search import Outcome, Search, Trial, best, row_with, searches_of
from solodg.data import DATASETS, DomainDataset, Loading
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import checked_arguments
from solodg.runs.stream import Stream, adapter_arguments
from solodg.storage import read_lines

MACHINE = Machine(accelerator="cpu", data_dir=Path("nowhere"))
QUICK = [
    "--backbone", "small_cnn", "--image-size", "32", "--steps", "2", "--batch-size", "4",
    "--context-images", "1", "--centre-images", "2", "--accelerator", "cpu",
]  # fmt: skip


@cache
def toy_data() -> DomainDataset:
    return DATASETS["toy"].load(Loading(Path("nowhere"), image_size=32, channels=3))


def search(runs: int = 12, **options) -> Search:
    given = {"dataset": "toy", "targets": ("sky",), "backbone": "small_cnn", "algorithm": "coral"}
    return Search("toy", RunConfig(**given | options), MACHINE, runs, toy_data())


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three sites; those of the fourth, the target, cannot be read at all."""
    cells = {(site, label): 6 for site in "abcd" for label in ("apple", "pear")}
    root = write_images(tmp_path_factory.mktemp("sites") / "sites", cells)
    for path in (root / "d").rglob("*.png"):
        path.write_bytes(b"no image")
    return root


def tune(sites: Path, output: Path, *more: object) -> list[str]:
    return ["tune", str(sites), "--target", "d", "--algorithm", "coral", *QUICK,
            "--output", str(output), *map(str, more)]  # fmt: skip


def test_a_killed_search_goes_on_and_never_reads_the_target(sites, tmp_path, solodg) -> None:
    output = tmp_path / "out"
    records = output / RECORDS
    process = forked.start(*tune(sites, output, "--runs", 6))
    while not records.is_file() and process.exitcode is None:
        time.sleep(0.02)
    process.kill()
    process.join()
    before = records.read_bytes()
    started = read_results(records).done
    assert 1 <= len(started) < 6
    code, text, err = solodg(*tune(sites, output, "--runs", 6))
    assert code == 0, err
    assert records.read_bytes().startswith(before.rstrip(b"\n"))
    done = read_results(records).done
    assert started.keys() < done.keys()
    assert len(done) == 6
    of_sources = {r.domain for each in done.values() for r in each}
    assert of_sources == {"a", "b", "c"}
    for each in done.values():
        config = each[0].config
        assert config["exclude"] == ["d"]
        assert config["score_on"] == "validation"
        assert len(each[0].target) == 1
    # The chosen settings are those of the best mean, and they are settings of a plan.
    found = Search(
        "again", RunConfig(dataset=str(sites), targets=("d",), algorithm="coral",
                           backbone="small_cnn", image_size=32, steps=2, batch_size=4,
                           context_images=1, centre_images=2),
        MACHINE, 6,
    )  # fmt: skip
    outcomes = found.outcomes(read_results(records))
    assert [o.trial.number for o in outcomes] == [0, 1]
    for outcome in outcomes:
        own = [c for c in found.cells() if c.row == f"trial {outcome.trial.number}"]
        per_domain = [
            next(r.metrics["accuracy"] for r in done[c.key] if r.role == "target") for c in own
        ]
        assert outcome.mean == pytest.approx(np.mean(per_domain))
    winner = best(outcomes)
    assert f"Best: trial {winner.trial.number}, {100 * winner.mean:.1f}%" in text
    (file,) = (output / "tables").glob("*.yaml")
    (row,) = [Row(**values) for values in yaml.safe_load(file.read_text())]
    plan = Plan(name="p", title="t", dataset=str(sites), targets=["d"], seeds=[0], rows=[row])
    (cell,) = plan.cells()
    assert cell.config.algorithm == "coral"
    if winner.trial.number:
        assert cell.config.learning_rate == winner.trial.rates["learning_rate"]
        assert cell.config.arguments["gamma"] == winner.trial.arguments["gamma"]
    assert len(read_lines(records)) == sum(map(len, done.values()))
    code, _, err = solodg(*tune(sites, output, "--runs", 6))
    assert code == 0
    assert "0 cells run" in err


def test_trials_follow_from_seed_and_number_and_the_first_has_the_settings_as_given() -> None:
    few, many = search(6), search(30)
    assert few.sources == ["ash", "clay", "moss"]
    assert [len(s.trials) for s in (few, many)] == [2, 10]
    assert few.trials == many.trials[:2]
    assert few.trials[0].settings() == {}
    assert search(30, seed=1).trials[1:] != many.trials[1:]
    assert {c.key for c in few.cells()} < {c.key for c in many.cells()}
    assert [c.row for c in few.cells()] == ["trial 0"] * 3 + ["trial 1"] * 3
    for cell in many.cells():
        assert cell.config.exclude == ("sky",)
        assert cell.config.targets[0] in ("ash", "clay", "moss")


def test_what_is_given_is_not_searched() -> None:
    every = {"learning_rate", "backbone_learning_rate", "gamma"}
    assert search().ranges.keys() == every
    assert search(learning_rate=0.1).ranges.keys() == every - {"learning_rate"}
    fixed = search(arguments={"gamma": 3})
    assert fixed.ranges.keys() == every - {"gamma"}
    assert {c.config.arguments["gamma"] for c in fixed.cells()} == {3}
    solo = {"algorithm": "solo", "variant": "no-prior-supervision"}
    assert "prior_weight" not in search(**solo).ranges
    assert "kl_weight" in search(**solo).ranges
    frozen = search(freeze_backbone=True, pretrained=True)
    assert frozen.ranges.keys() == every - {"backbone_learning_rate"}
    assert search(targets=(), exclude=("sky",)).targets == ("sky",)  # toy's default target


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_range_is_of_an_argument_that_takes_its_values(name: str) -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        drawn = {n: r.draw(generator, 300) for n, r in ALGORITHMS[name].search.items()}
        arguments = checked_arguments(name, drawn)
        assert {n: arguments[n] for n in drawn} == drawn
        assert isinstance(on_images(name, **arguments), ALGORITHMS[name])


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_range_of_an_adapter_is_of_an_argument_that_takes_its_values(name: str) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        drawn = {n: r.draw(generator, 1) for n, r in ADAPTERS[name].search.items()}
        assert drawn.items() <= adapter_arguments(name, drawn).items()


def test_ranges_stay_within_their_bounds_and_reach_all_of_them() -> None:
    generator = np.random.default_rng(0)

    def drawn(found) -> np.ndarray:
        return np.array([found.draw(generator, 200) for _ in range(400)])

    logs = np.log10(drawn(LogUniform(1e-3, 10.0)).astype(float))
    assert -3 <= logs.min() < -2.9
    assert 0.9 < logs.max() <= 1
    assert abs(np.mean(logs < -1) - 0.5) < 0.1  # orders of magnitude alike
    assert 2 <= drawn(Uniform(2, 4)).min() < drawn(Uniform(2, 4)).max() <= 4
    steps = drawn(StepShare(0.25, 0.5))
    assert (steps.min(), steps.max()) == (50, 100)
    assert set(drawn(Choice(("a", "b")))) == {"a", "b"}


def test_the_best_is_the_highest_mean_and_of_equal_ones_the_first() -> None:
    trials = [Trial(n, {}, {}) for n in range(3)]
    means = [{"a": 0.2, "b": 0.6}, {"a": 0.9, "b": 0.1}, {"a": 0.5, "b": 0.5}]
    outcomes = [Outcome(t, m) for t, m in zip(trials, means, strict=True)]
    assert best(outcomes).trial.number == 1
    assert best(outcomes[2:] + outcomes[1:2]).trial.number == 1
    assert Trial(1, {"learning_rate": 0.1}, {"gamma": 2.0}).options() == (
        "--learning-rate 0.1 --set gamma=2.0"
    )


PLAN = """
title: Toy
dataset: toy
targets: [sky, moss]
seeds: [3]
run: {backbone: small_cnn, steps: 4, arguments: {second_order: false}}
rows:
  - {name: MLDG, run: {algorithm: mldg, arguments: {beta: 2}},
     by_target: {moss: {arguments: {beta: 3}}}}
"""


def test_every_row_and_target_of_a_plan_is_searched_and_takes_the_settings(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(PLAN)
    plan = read_plan(tmp_path / "toy.yaml")
    (row, sky), (_, moss) = searches_of(plan, MACHINE, 9)
    assert (sky.sources, moss.sources) == (["ash", "clay", "moss"], ["ash", "clay", "sky"])
    assert sky.ranges.keys() == {"learning_rate", "backbone_learning_rate", "alpha"}
    assert {c.config.seed for c in sky.cells()} == {3}
    assert {c.config.arguments["beta"] for c in moss.cells()} == {3}
    trial = Trial(1, {"learning_rate": 0.5}, {"alpha": 0.25})
    tuned = row_with(row_with(row, sky, trial), moss, Trial(0, {}, {}))
    cells = plan.model_copy(update={"rows": [tuned]}).cells()
    found = {c.config.targets[0]: c.config for c in cells}
    assert found["sky"].learning_rate == 0.5
    expected = {"alpha": 0.25, "beta": 2, "second_order": False}
    assert expected.items() <= found["sky"].arguments.items()
    assert found["moss"].arguments["beta"] == 3
    assert found["moss"].arguments["second_order"] is False
    assert found["moss"].learning_rate != 0.5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runs": 5}, "Give at least 6"),
        ({"exclude": ("ash",)}, "at least 3 are needed, and there are 2"),
        ({"algorithm": "ridge", "pretrained": True}, "nothing is left to search"),
        ({"pseudo_domains": "random"}, "no evidence of another domain"),
        ({"devices": "2"}, "leave out --devices"),
    ],
)
def test_what_cannot_be_searched_is_told(options: dict, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        search(**options)


def test_a_plan_is_searched_alone(tmp_path: Path, solodg) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(PLAN)
    code, _, err = solodg("tune", path, "--steps", 3, "--output", tmp_path / "out")
    assert code == 2
    assert "steps: a plan sets these itself" in " ".join(err.split())
    path.write_text(PLAN.replace("name: MLDG", "name: MLDG, adapter: bn"))
    code, _, err = solodg("tune", path, "--output", tmp_path / "out")
    assert code == 2
    assert "nothing is left to search: bn has no other main setting" in " ".join(err.split())


ADAPTER_PLAN = """
title: Sites
dataset: {sites}
targets: [d]
seeds: [3]
run: {{algorithm: erm, backbone: small_cnn, image_size: 32, steps: 3, batch_size: 4,
      context_images: 1, centre_images: 2, val_fraction: 0.5}}
rows:
  - {{name: T3A, adapter: t3a}}
  - {{name: Tent, adapter: tent, stream: {{batch_size: 4, arguments: {{steps: 3}}}}}}
"""


def test_an_adapter_is_searched_on_one_model_for_each_source_domain(
    sites, tmp_path, solodg
) -> None:
    path, output = tmp_path / "adapters.yaml", tmp_path / "out"
    path.write_text(ADAPTER_PLAN.format(sites=sites))
    code, _, err = solodg("tune", path, "--runs", 9, "--output", output)
    assert code == 0, err  # the images of the target, d, cannot be read
    assert "6 trials, 3 trainings" in " ".join(err.split())
    assert len(list((output / "runs").iterdir())) == 3
    plan = read_plan(path)
    results = read_results(output / RECORDS)
    (t3a, of_t3a), (_, of_tent) = searches_of(plan, MACHINE, 9)
    assert of_t3a.ranges.keys() == {"keep"}
    assert of_tent.ranges.keys() == {"learning_rate"}  # steps are given
    for search_of, name in ((of_t3a, "t3a"), (of_tent, "tent")):
        for cell in search_of.cells():
            (record,) = results.done[cell.key]
            trial = search_of.trials[int(cell.row.removeprefix("trial "))]
            assert (record.adapter, record.role) == (name, "target")
            assert record.domain in "abc"
            assert record.config["exclude"] == ["d"]
            assert trial.arguments.items() <= record.stream["arguments"].items()
    # The rows that it prints have what was best, for this target alone.
    (file,) = (output / "tables").glob("*.yaml")
    rows = [Row(**values) for values in yaml.safe_load(file.read_text())]
    for row, search_of in zip(rows, (of_t3a, of_tent), strict=True):
        winner = best(search_of.outcomes(results)).trial
        assert row.adapter_by_target == {"d": winner.arguments}
        chosen = plan.model_copy(update={"rows": [row]}).cells()
        stream = chosen[0].stream or Stream()
        assert winner.arguments.items() <= stream.arguments.items()
    assert chosen[0].stream.batch_size == 4
    assert chosen[0].stream.arguments["steps"] == 3
    tuned = row_with(t3a, of_t3a, Trial(1, {}, {"keep": "all"}))
    (cell,) = plan.model_copy(update={"rows": [tuned]}).cells()
    assert cell.stream.arguments == {"keep": "all"}
