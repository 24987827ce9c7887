"""A final model on all domains, and what to expect of it on a site that nobody has seen."""

import json
import shutil
import statistics
import time
from pathlib import Path

import pytest
from scipy import stats

import forked
from conftest import write_images
from solodg.bench.plan import Plan
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.estimate import train_with_estimate
from solodg.runs.evaluate import evaluate_run
from solodg.runs.evidence import Evidence
from solodg.runs.novelty import LEFT_OUT
from solodg.runs.open_parts import PartDecision
from solodg.runs.site_estimate import METRICS, estimate_rows, read_estimate
from solodg.runs.temperature import load_temperature
from solodg.runs.train import train_run
from solodg.runs.turn_choices import chosen_steps, evidence_of_turns
from solodg.storage.tensors import read_tensors

CPU = Machine(accelerator="cpu")
SITES = ("east", "north", "west")
SMALL = {"backbone": "small_cnn", "image_size": 16, "steps": 6, "validate_every": 2, "pose": "off",
         "batch_size": 4, "context_images": 1, "centre_images": 4}  # fmt: skip


def options(**values: object) -> list[str]:
    """The settings as options of the command line."""
    given = {"accelerator": "cpu"} | SMALL | values
    return [text for k, v in given.items() for text in (f"--{k.replace('_', '-')}", str(v))]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three sites, enough of each to be held out."""
    cells = {(site, label): 20 for site in SITES for label in ("benign", "malign")}
    return write_images(tmp_path_factory.mktemp("sites") / "scans", cells, size=16)


def config(sites: Path, **values: object) -> RunConfig:
    return RunConfig(dataset=str(sites), **SMALL | values)


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def run(sites: Path, said: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A final model of the default method, with an estimate."""
    folder = tmp_path_factory.mktemp("estimate") / "run"
    return train_with_estimate(config(sites), CPU, folder, say=said.append)


def turn(run: Path, number: int, method: str = "model") -> Path:
    return run / "estimate" / f"{number}-{SITES[number]}" / method


def test_the_estimate_is_the_mean_of_runs_that_each_leave_one_site_out(
    run: Path, sites: Path, tmp_path: Path
) -> None:
    found = json.loads((run / "estimate.json").read_text())
    for method, given in (("model", {}), ("erm", {"algorithm": "erm"})):
        alone = config(sites, targets=("north",), **given)
        records = evaluate_run(train_run(alone, CPU, tmp_path / method))
        (expected,) = (r.metrics for r in records if r.role == "target")
        assert [s["domain"] for s in found[method]["sites"]] == list(SITES)
        assert found[method]["sites"][1]["metrics"] == expected
        for name in METRICS:
            values = [site["metrics"][name] for site in found[method]["sites"]]
            mean, (low, high) = statistics.mean(values), (0.0, 0.0)
            if len(set(values)) > 1:
                error = stats.sem(values)
                low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
            assert found[method]["mean"][name]["mean"] == pytest.approx(mean)
            assert found[method]["mean"][name]["half_interval"] == pytest.approx((high - low) / 2)
    pairs = zip(found["model"]["sites"], found["erm"]["sites"], strict=True)
    gains = [ours["metrics"]["nll"] - theirs["metrics"]["nll"] for ours, theirs in pairs]
    assert found["difference"]["nll"]["mean"] == pytest.approx(statistics.mean(gains))


def test_the_final_model_has_the_steps_and_the_parts_that_the_turns_chose(
    run: Path, said: list[str]
) -> None:
    models = [json.loads((turn(run, n) / "model.json").read_text()) for n in range(3)]
    steps = [read_tensors(turn(run, n) / "model.safetensors")[1]["step"] for n in range(3)]
    final = json.loads((run / "model.json").read_text())
    on = sum(bool(model["image_norm"]) for model in models) > 1.5
    assert bool(final["image_norm"]) == on
    assert read_tensors(run / "model.safetensors")[1]["step"] == statistics.median(steps)
    evidence = json.loads((run / "evidence.json").read_text())
    (part,) = (p for p in evidence["parts"] if p["part"] == "image norm")
    assert part["on"] == on
    assert f"on in {sum(bool(m['image_norm']) for m in models)} of 3 turns" in part["why"]
    for n, site in enumerate(SITES):
        own = json.loads((turn(run, n) / "evidence.json").read_text())["accuracy"]
        for held, accuracy in own.items():
            assert evidence["accuracy"][f"{held} (without {site})"] == accuracy
    text = "\n".join(said)
    assert f"image norm: {'on' if on else 'off'}, as it was on in" in text
    assert f"Steps of the final model: {statistics.median(steps)}" in text


def test_the_final_model_is_trained_on_all_sites_and_says_so(run: Path, said: list[str]) -> None:
    model = json.loads((run / "model.json").read_text())
    assert model["source_domains"] == list(SITES)
    assert model["left_out_domains"] == []
    left_out = json.loads((turn(run, 0) / "model.json").read_text())["left_out_domains"]
    assert left_out == ["east"]
    assert json.loads((run / "config.json").read_text())["targets"] == []
    assert "Training on all domains: east, north, west. None is left out to score." in said
    assert not any("Nothing estimates" in text for text in said)


def test_the_model_card_has_the_sites_the_choices_and_the_estimate(run: Path) -> None:
    card = (run / "README.md").read_text()
    assert card.startswith("---\n")
    assert card.split("---\n", 2)[2].startswith("\n# solo_plus on scans\n")
    assert "all that the data has" in card
    assert all(f"{site} (40 images)" in card for site in SITES)
    assert "classes: benign, malign" in card
    assert "left out (targets): none" in card
    assert "16 pixels" in card
    assert f"- novelty: 0 to 1; {LEFT_OUT}" in card
    assert f"- temperature: {load_temperature(run).sentence()}" in card
    evidence = json.loads((run / "evidence.json").read_text())
    assert all(part["why"] in card for part in evidence["parts"])
    estimate = read_estimate(run)
    for row in estimate_rows(estimate)[1]:
        assert f"| {' | '.join(row)} |" in card
    accuracy = estimate.model.mean["accuracy"]
    assert f"{100 * accuracy.mean:.1f} ± {100 * accuracy.half_interval:.1f}" in card
    assert "none was made" not in card
    assert f"torch {json.loads((run / 'versions.json').read_text())['torch']}" in card
    of_turn = (turn(run, 0) / "README.md").read_text()
    assert "trained on 2 domains, without east" in of_turn
    assert "Estimate for a new site: none was made." in of_turn


def test_the_report_and_the_evaluation_have_the_estimate(run: Path, tmp_path: Path, solodg) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    code, _, errors = solodg("evaluate", copy)
    assert code == 0
    assert "trained on all domains: none is left out" in " ".join(errors.split())
    assert read_estimate(run).sentence()[:40] in " ".join(errors.split())
    records = [json.loads(line) for line in (copy / "results.jsonl").read_text().splitlines()]
    assert {r["role"] for r in records} == {"source-validation"}
    assert solodg("report", copy, "--images", 2)[0] == 0
    page = (copy / "report.html").read_text()
    assert "What to expect on a new site" in page
    assert "trained on all domains" in page
    assert all(cell in page for row in estimate_rows(read_estimate(run))[1] for cell in row)


@pytest.fixture(scope="module")
def erm_run(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A final model of ERM, with an estimate."""
    folder = tmp_path_factory.mktemp("erm") / "run"
    return train_with_estimate(config(sites, algorithm="erm"), CPU, folder)


def test_erm_is_not_compared_with_itself(erm_run: Path) -> None:
    found = read_estimate(erm_run)
    assert (found.erm, found.difference) == (None, {})
    assert [site.run for site in found.model.sites] == [
        f"estimate/{number}-{site}/model" for number, site in enumerate(SITES)
    ]


def test_a_killed_estimate_goes_on_and_ends_the_same(
    erm_run: Path, sites: Path, tmp_path: Path
) -> None:
    folder, erm = tmp_path / "run", config(sites, algorithm="erm")
    command = ["train", sites, "--estimate", "--output", folder, *options(algorithm="erm")]
    process = forked.start(*command)
    while not (turn(folder, 1) / "config.json").is_file() and process.exitcode is None:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (folder / "estimate.json").exists()
    with pytest.raises(UserError, match="Continue it with --resume"):
        train_with_estimate(erm, CPU, folder)
    with pytest.raises(UserError, match="with --estimate, to resume it"):
        train_run(erm, CPU, folder, resume=True)
    done = turn(folder, 0) / "model.safetensors"
    before = done.stat().st_mtime_ns
    train_with_estimate(erm, CPU, folder, resume=True)
    assert done.stat().st_mtime_ns == before
    same = [json.loads((f / "estimate.json").read_text()) for f in (erm_run, folder)]
    assert same[0] == same[1]
    ours, theirs = (read_tensors(f / "model.safetensors")[0] for f in (erm_run, folder))
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())
    assert not list(folder.rglob("*.lock"))


def test_an_estimate_does_not_go_on_with_other_images(
    run: Path, sites: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "finished.json").unlink()
    moved = shutil.copytree(sites, tmp_path / "scans")
    (moved / "west" / "benign" / "0.png").unlink()
    with pytest.raises(UserError, match="'west' had 40 images and has 39"):
        train_with_estimate(config(moved), CPU, folder, resume=True)


def test_a_finished_estimate_is_left_as_it_is(run: Path, sites: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    said: list[str] = []
    train_with_estimate(config(sites), CPU, run, resume=True, say=said.append)
    assert "finished already" in " ".join(said)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def plain(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A final model without an estimate."""
    return train_run(config(sites, algorithm="erm"), CPU, tmp_path_factory.mktemp("plain") / "run")


def test_training_without_a_target_takes_all_domains(
    sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solodg
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = solodg("train", sites, *options(algorithm="erm", steps=1))
    assert code == 0
    assert "Nothing estimates the accuracy on a new site: --estimate does" in errors
    assert "Model: runs/scans-all-erm-0, trained on all domains" in output
    card = (tmp_path / "runs" / "scans-all-erm-0" / "README.md").read_text()
    assert "Estimate for a new site: none was made." in card
    assert "Nothing estimates its accuracy on a new site" in card


def test_a_model_of_all_domains_predicts_and_scores_a_new_site(
    plain: Path, sites: Path, solodg
) -> None:
    assert solodg("predict", plain, sites / "east" / "benign" / "0.png")[0] == 0
    code, output, _ = solodg("evaluate", plain, "--on", sites / "east", "--json")
    assert code == 0
    assert json.loads(output)["role"] == "new-site"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["evaluate", "RUN", "--adapter", "bn"], "name labelled images of one with --on"),
        (["evaluate", "RUN", "--images", "2"], "name labelled images of one with --on"),
    ],
)
def test_what_needs_an_unseen_domain_is_refused(
    plain: Path, command: list[str], reason: str, solodg
) -> None:
    code, _, errors = solodg(*(plain if word == "RUN" else word for word in command))
    assert code == 2
    assert reason in " ".join(errors.split())


def test_a_study_of_a_model_of_all_domains_is_refused(run: Path, tmp_path: Path, solodg) -> None:
    adapting = json.loads((run / "model.json").read_text())["image_norm"]
    code, _, errors = solodg("study", run)
    assert code == 2
    assert ("was trained on all domains" if adapting else "does not adapt") in errors


def test_a_model_of_all_domains_is_not_scored_on_changed_sources(
    plain: Path, sites: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(sites, tmp_path / "scans")
    (moved / "west" / "benign" / "0.png").unlink()
    with pytest.raises(UserError, match="trained on all domains, with other images"):
        evaluate_run(plain, dataset=str(moved))


def test_two_domains_train_a_final_model_but_no_estimate(tmp_path: Path, sites: Path) -> None:
    two = config(sites, algorithm="erm", steps=1, exclude=("west",))
    with pytest.raises(UserError, match=r"at least 3 domains, and there are 2 \(east, north\)"):
        train_with_estimate(two, CPU, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    train_run(two, CPU, tmp_path / "run")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "neither trained on nor scored: west" in card


def test_one_domain_is_refused_with_what_to_try(tmp_path: Path, sites: Path) -> None:
    one = config(sites, algorithm="erm", exclude=("west", "north"))
    with pytest.raises(UserError, match=r"there is only 'east'.*--pseudo-domains"):
        train_run(one, CPU, tmp_path / "run")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"targets": ("east",)}, "--target east leaves out that one"),
        ({"devices": "2"}, "on one device"),
        ({"select": "leave-one-out"}, "cannot leave 'east' out: --select"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_refused(
    values: dict[str, object], reason: str, sites: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        train_with_estimate(config(sites, **values), CPU, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_group_in_two_sites_is_not_in_the_estimate(sites: Path, tmp_path: Path) -> None:
    rows = ["path,label,domain,group"]
    for path in sorted(sites.rglob("*.png")):
        site, label, name = path.relative_to(sites).parts
        patient = "shared" if name == "0.png" and site != "west" else f"{site}-{label}-{name}"
        rows.append(f"{path},{label},{site},{patient}")
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"cannot leave 'east' out: 1 group\(s\)"):
        train_with_estimate(config(listed), CPU, tmp_path / "run")


def test_a_run_without_estimate_does_not_go_on_with_one(plain: Path, sites: Path) -> None:
    with pytest.raises(UserError, match="begun without --estimate"):
        train_with_estimate(config(sites, algorithm="erm"), CPU, plain, resume=True)


def test_a_plan_of_own_images_needs_targets(sites: Path) -> None:
    for targets in (None, [[]]):
        plan = Plan(title="t", dataset=str(sites), targets=targets, seeds=[0], name="p",
                    rows=[{"name": "erm", "run": {"algorithm": "erm"}}])  # fmt: skip
        with pytest.raises(UserError, match="name the domains to leave out"):
            plan.cells()


def evidence(image_norm: object, *, on: bool, gain: float | None = 1.5) -> Evidence:
    part = PartDecision(part="image norm", on=on, why="for a reason", gain=gain)
    return Evidence(rests_on="a fold", parts=[part], accuracy={"x": {"plain": 50.0}},
                    image_norm=image_norm, pose=False, seconds=1.0)  # fmt: skip


def test_a_part_is_on_if_most_turns_have_it_on_and_off_at_a_tie() -> None:
    on, off = evidence(100.0, on=True), evidence(None, on=False)
    two_of_three = evidence_of_turns({"a": on, "b": off, "c": on})
    assert (two_of_three.image_norm, two_of_three.parts[0].on) == (100.0, True)
    assert "on in 2 of 3 turns" in two_of_three.parts[0].why
    tie = evidence_of_turns({"a": on, "b": off})
    assert (tie.image_norm, tie.parts[0].on) == (None, False)


def test_of_several_settings_the_most_frequent_is_taken_then_the_cheaper() -> None:
    few, many = (0.0, 300.0), (0.0, 100.0, 1000.0, "line:300")
    turns = [evidence(setting, on=True) for setting in (many, few, many)]
    assert evidence_of_turns(dict(zip("abc", turns, strict=True))).image_norm == many
    assert evidence_of_turns(dict(zip("ab", turns[:2], strict=True))).image_norm == few


@pytest.mark.parametrize(
    ("selected", "steps"), [([40], 40), ([10, 40, 20], 20), ([10, 20], 15), ([3, 4, 9, 1], 4)]
)
def test_the_steps_are_the_median_of_the_turns(selected: list[int], steps: int) -> None:
    assert chosen_steps(selected) == steps
