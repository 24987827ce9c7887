"""Stored maps: the frozen first stages are computed once, and the rest is trained on them."""

import copy
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from solodg.algorithms import ALGORITHMS
from solodg.bench.cell import Cell
from solodg.bench.duration import _measured_seconds
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.transforms import to_unit
from solodg.errors import UserError
from solodg.models.backbones import Backbone, build_backbone
from solodg.models.cut import Cut
from solodg.models.map_backbone import MapBackbone
from solodg.predict.export import export_onnx
from solodg.predict.onnx import OnnxPredictor
from solodg.predict.torch import Predictor
from solodg.progress import NoProgress
from solodg.runs import checkpoint
from solodg.runs.build import with_features
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import is_closed_form, resolve
from solodg.runs.evaluate import evaluate_run
from solodg.runs.map_cache import MapStore
from solodg.runs.metrics import predict
from solodg.runs.opened_data import input_batches
from solodg.runs.row_files import RowFiles
from solodg.runs.scored_data import open_scored
from solodg.runs.train import train_run
from solodg.storage import read_json

NEED_IMAGES = ("dson", "jigen", "l2a_ot", "mixstyle", "ttt")
READINGS = ("small_cnn", "test_resnet", "test_efficientnet", "test_byobnet")


def backbone_of(name: str, image_norm=None) -> Backbone:
    """A backbone with random weights and statistics, so that every layer does something."""
    torch.manual_seed(0)
    backbone = build_backbone(name, channels=3, image_size=32, image_norm=image_norm)
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.2, 0.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    backbone.freeze_norm()
    return backbone.eval()


def blocks_of(cut: Cut, x: torch.Tensor) -> torch.Tensor:
    """Rows with all readings, as a store gives them: (B, readings * width)."""
    readings = cut.backbone.readings
    rows = cut.rows(x).view(len(readings), len(x), -1)
    numbers = torch.arange(len(readings))[:, None, None].expand(-1, len(x), 1)
    return torch.cat([numbers, rows], 2).transpose(0, 1).flatten(1)


def cuts(*names: str) -> list[tuple[str, int]]:
    counts = {n: len(build_backbone(n, channels=3, image_size=32).net.stages()) for n in names}
    return [(name, stages) for name in names for stages in range(1, counts[name])]


@pytest.mark.parametrize(("name", "stages"), cuts(*READINGS, "test_convnext"))
def test_a_cut_is_exact_at_every_stage(name: str, stages: int) -> None:
    backbone = backbone_of(name, None if name == "test_convnext" else (0.0, 40.0, "grey:40"))
    cut = Cut(backbone, stages)
    tail = MapBackbone(cut).eval()
    x = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        rows, whole = blocks_of(cut, x), backbone(x)
        torch.testing.assert_close(tail(rows).embedding, whole.embedding, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail(rows).style, whole.style, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail.embed(rows), backbone.embed(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tail.embed_each(rows), backbone.embed_each(x))
        torch.testing.assert_close(tail.last_map(rows), backbone.last_map(x))
        last = backbone.last_map(x)
        torch.testing.assert_close(tail.pool(last), backbone.pool(last))


@pytest.mark.parametrize(("name", "stages"), cuts(*READINGS))
def test_the_tail_holds_the_trained_parameters_of_the_backbone(name: str, stages: int) -> None:
    backbone = backbone_of(name)
    backbone.train_last(stages)
    tail = MapBackbone(Cut(backbone, stages))
    trained = {n: p for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained
    assert {n: id(p) for n, p in tail.named_parameters()} == {n: id(p) for n, p in trained.items()}
    assert tail.state_dict().keys() < backbone.state_dict().keys()


def test_in_training_every_row_is_read_by_the_reading_of_its_block() -> None:
    backbone = backbone_of("small_cnn", (0.0, 40.0))
    cut = Cut(backbone, 2)
    tail = MapBackbone(cut)
    x = torch.rand(4, 3, 32, 32)
    rows = blocks_of(cut, x).view(4, 2, -1)
    numbers = torch.tensor([1, 0, 0, 1])
    with torch.no_grad():
        found = tail.train()(rows[torch.arange(4), numbers])
        tail.eval()
        for number, reading in enumerate(backbone.readings):
            with backbone.reading_as([reading]), torch.no_grad():
                expected = backbone(x)
            own = numbers == number
            torch.testing.assert_close(found.embedding[own], expected.embedding[own])
            torch.testing.assert_close(found.style[own], expected.style[own])
            with tail.reading_as([reading]):
                torch.testing.assert_close(tail.embed(rows.flatten(1)), expected.embedding)
    torch.manual_seed(3)
    drawn = tail.train().embed(rows.flatten(1))
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, backbone.train().embed(x))


def test_cutting_leaves_the_backbone_as_it_was() -> None:
    backbone = backbone_of("test_efficientnet", (0.0, 40.0)).train()
    before = copy.deepcopy(backbone.state_dict())
    modes = [module.training for module in backbone.modules()]
    state = torch.random.get_rng_state()
    Cut(backbone, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in backbone.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in backbone.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())


@pytest.mark.parametrize(
    ("name", "stages", "text"),
    [
        ("small_cnn", 4, "none of them is frozen"),
        ("test_vit", 2, "cannot be cut before its last 2"),
        ("test_nfnet", 1, "cannot be cut"),
    ],
)
def test_a_backbone_that_cannot_be_cut_is_refused(name: str, stages: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        Cut(build_backbone(name, channels=3, image_size=160 if "vit" in name else 32), stages)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, str]:
    """Files of initial weights, by the name of their backbone."""
    files = {}
    for name in ("small_cnn", "test_efficientnet"):
        files[name] = str(tmp_path_factory.mktemp("weights") / f"{name}.safetensors")
        net = backbone_of(name).net
        state = net.state_dict() if name == "small_cnn" else net.model.state_dict()
        save_file({n: t.contiguous() for n, t in state.items()}, files[name])
    return files


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(accelerator="cpu", cache_dir=tmp_path / "cache")


def config_of(files: dict[str, str], backbone: str = "small_cnn", **values) -> RunConfig:
    fast = {"batch_size": 4, "context_images": 2, "centre_images": 3, "steps": 6,
            "image_size": 32, "validate_every": 3}  # fmt: skip
    defaults = {"dataset": "toy", "targets": ("sky",), "algorithm": "erm", "train_stages": 2,
                "backbone": backbone, "weights": files[backbone], "stored_views": 0,
                "backbone_learning_rate": 1e-3, "learning_rate": 1e-3}  # fmt: skip
    return RunConfig(**defaults | fast | values)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["<f2", "<f4"])
@pytest.mark.parametrize(
    ("backbone", "image_norm"), [("small_cnn", (0.0, 40.0)), ("test_efficientnet", 0)]
)
def test_training_from_maps_gives_the_weights_of_training_from_pixels(
    tmp_path, weights, machine, monkeypatch, backbone, image_norm, kind
) -> None:
    monkeypatch.setattr(MapStore, "number_kind", kind)
    config = config_of(weights, backbone, augment=False, image_norm=image_norm, steps=3)
    train_run(config, machine, tmp_path / "maps")
    pixels = config.model_copy(update={"stored_views": None})
    train_run(pixels, machine, tmp_path / "pixels")
    found, expected = tensors(tmp_path / "maps"), tensors(tmp_path / "pixels")
    assert found.keys() == expected.keys()
    prefix = "backbone.net." if backbone == "small_cnn" else "backbone.net.model."
    initial = {prefix + name: tensor for name, tensor in load_file(weights[backbone]).items()}
    moved = [n for n in initial if n in expected and not torch.equal(initial[n], expected[n])]
    assert moved
    # Adam turns the smallest gradients into whole steps, so the distance is measured as one.
    apart = sum(float((found[n] - expected[n]).square().sum()) for n in moved) ** 0.5
    way = sum(float((initial[n] - expected[n]).square().sum()) for n in moved) ** 0.5
    assert apart < {"<f2": 0.1, "<f4": 0.02}[kind] * way
    for name in expected.keys() - set(moved):
        torch.testing.assert_close(found[name], expected[name], atol=1e-2, rtol=1e-2, msg=name)


def test_scores_from_maps_are_those_of_the_saved_model_from_pixels(
    tmp_path, weights, machine
) -> None:
    config = config_of(weights, image_norm=(0.0, 40.0), stored_views=3, weight_average=0.9)
    train_run(config, machine, tmp_path / "run")
    model, info = checkpoint.load(tmp_path / "run")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    scored = open_scored(
        tmp_path / "run", model, info, machine, torch.device("cpu"),
        progress=NoProgress(), say=lambda text: None,
    )  # fmt: skip
    for part in scored.parts:
        found = predict(scored.algorithm.probabilities, input_batches(part.images))
        expected = predict(model.probabilities, input_batches(part.pixels))
        np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=2e-3)
    with torch.no_grad():
        for parameter in scored.algorithm.parameters():
            parameter.add_(1.0)  # what the copy learns is not the model's
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    export_onnx(Predictor.load(tmp_path / "run"), tmp_path / "model.onnx")
    x = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    onnx = OnnxPredictor.load(tmp_path / "model.onnx").predict_pixels(x)
    torch_ = Predictor.load(tmp_path / "run").predict_pixels(x)
    for one, other in zip(onnx, torch_, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-4)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, weights, machine) -> None:
    config = config_of(weights, stored_views=2, image_norm=(0.0, 40.0), weight_average=0.9)
    train_run(config, machine, tmp_path / "whole")

    class KilledError(BaseException):
        pass

    class Bars(NoProgress):
        @contextmanager
        def bar(self, title, total, done=0):
            seen = []

            def advance(count, note=""):
                seen.append(count)
                if title == "Training" and sum(seen) == 4:
                    raise KilledError

            yield advance

    with pytest.raises(KilledError):
        train_run(config, machine, tmp_path / "killed", progress=Bars())
    train_run(config, machine, tmp_path / "killed", resume=True)
    whole, killed = tensors(tmp_path / "whole"), tensors(tmp_path / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.parametrize("views", [0, 2])
def test_held_out_domains_decide_about_readings_on_stored_maps(
    tmp_path, weights, machine, monkeypatch, views
) -> None:
    monkeypatch.setattr("solodg.runs.evidence.LEAST_IMAGES", 1)
    monkeypatch.setattr("solodg.runs.folds.LEAST_IMAGES", 1)
    config = config_of(weights, algorithm="solo_plus", image_norm="auto", stored_views=views)
    train_run(config, machine, tmp_path / "run")
    evidence = read_json(tmp_path / "run" / "evidence.json")
    assert evidence["accuracy"]
    info = checkpoint.load_info(tmp_path / "run")
    assert (info.image_norm or 0) == (evidence["image_norm"] or 0)
    assert evaluate_run(tmp_path / "run")
    # The frozen stages are those of the given weights, the trained ones are not.
    saved, initial = tensors(tmp_path / "run"), load_file(weights["small_cnn"])
    assert torch.equal(saved["backbone.net.blocks.1.0.weight"], initial["blocks.1.0.weight"])
    assert not torch.equal(saved["backbone.net.blocks.2.0.weight"], initial["blocks.2.0.weight"])


def test_leave_one_out_selection_starts_every_training_from_the_given_weights(
    tmp_path, weights, machine
) -> None:
    config = config_of(weights, stored_views=1, select="leave-one-out", steps=2, validate_every=1)
    train_run(config, machine, tmp_path / "run")
    assert evaluate_run(tmp_path / "run")


def test_maps_are_computed_once_for_all_seeds_and_found_when_scoring(
    tmp_path, weights, machine, monkeypatch, image_folder
) -> None:
    seen: list[int] = []
    real = Cut.rows
    monkeypatch.setattr(Cut, "rows", lambda self, x: (seen.append(len(x)), real(self, x))[1])
    config = config_of(weights, stored_views=2, dataset=str(image_folder), targets=("b",))
    said: list[str] = []
    train_run(config, machine, tmp_path / "r0", say=said.append)
    assert sum("GB for stored maps" in line for line in said) == 1
    images = sum(seen)
    train_run(config.model_copy(update={"seed": 1}), machine, tmp_path / "r1", say=said.append)
    train_run(config.model_copy(update={"stored_views": 1}), machine, tmp_path / "r2")
    assert sum(seen) == images == 3 * 30
    records = evaluate_run(tmp_path / "r0", machine=machine)
    target = sum(r.metrics["images"] for r in records if r.role == "target")
    assert sum(seen) == images + target  # once, without copies


def test_copies_are_drawn_evenly_over_readings_and_differ_from_the_image(
    tmp_path, weights, toy
) -> None:
    backbone = backbone_of("small_cnn", (0.0, 40.0))
    part = toy.targets(["sky"])["sky"]
    store = MapStore(
        Cut(backbone, 2), "small_cnn", tmp_path, torch.device("cpu"), NoProgress(), copies=3
    )
    (stored,) = store.replace_images([part])
    images = stored.images
    whole = images.take(np.arange(len(part))).view(len(part), 2, -1)
    assert whole.dtype == torch.float16
    with torch.no_grad():
        expected = blocks_of(store.cut, to_unit(part.images.take(np.arange(len(part)))))
    torch.testing.assert_close(whole.flatten(1).float(), expected, atol=2e-3, rtol=2e-3)
    generator = np.random.default_rng(0)
    readings, variants = [], set()
    for _ in range(200):
        (block,) = images.draw([5], generator)
        readings.append(int(block[0]))
        variants.add((int(block[0]), bytes(block.numpy())))
    assert 70 < sum(readings) < 130
    # Reading 0 has the image and copies 1 and 3; reading 1 has the image and copy 2.
    assert sorted(number for number, _ in variants) == [0, 0, 0, 1, 1]
    half = images.subset([5, 2])
    assert torch.equal(half.take([0, 1]), images.take([5, 2]))


def test_an_episode_holds_each_image_once_whatever_its_copies(tmp_path, toy) -> None:
    backbone = backbone_of("small_cnn")
    source = toy.leave_out(["sky"])
    store = MapStore(
        Cut(backbone, 1), "small_cnn", tmp_path, torch.device("cpu"), NoProgress(), copies=1
    )
    stored = with_features(source, store)
    sampler = EpisodeSampler(stored.train, context=2, queries=4, seed=0)
    loader = EpisodeLoader(stored.train, sampler)
    first, again = loader.load(3), loader.load(3)
    assert torch.equal(first.target.x, again.target.x)
    assert first.target.x.shape[1] == MapBackbone(store.cut).row_width
    plain = EpisodeLoader(source.train, EpisodeSampler(source.train, context=2, queries=4, seed=0))
    assert torch.equal(plain.load(3).target.y, first.target.y)


def test_maps_that_do_not_fit_the_disk_are_refused(tmp_path, weights, machine, monkeypatch) -> None:
    small = machine.model_copy(update={"map_disk_gb": 1e-5})
    with pytest.raises(UserError, match=r"--map-disk-gb.*--clear maps"):
        train_run(config_of(weights), small, tmp_path / "run")
    monkeypatch.setattr("solodg.runs.map_cache.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"0\.00 GB are free"):
        train_run(config_of(weights), machine, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"train_stages": None}, "--train-stages 2"),
        ({"train_stages": None, "freeze_backbone": True}, "--train-stages"),
        ({"weights": None}, "--pretrained or --weights"),
        ({"freeze_norm": False}, "no --train-norm"),
        ({"pose": "on"}, "cannot be rotated"),
        ({"stored_views": 2, "augment": False}, "--stored-views 0"),
        ({"train_stages": 4}, "none of them is frozen"),
        *(({"algorithm": a}, "stored features or maps") for a in NEED_IMAGES),
    ],
)
def test_what_does_not_go_with_stored_maps_is_refused(
    tmp_path, weights, machine, values, text
) -> None:
    with pytest.raises(UserError, match=text):
        train_run(config_of(weights, **values), machine, tmp_path / "run")
    assert not list(tmp_path.rglob("*.npy"))


def test_keys_of_recorded_cells_do_not_change(weights) -> None:
    config = resolve(config_of(weights, stored_views=None))
    stored = config.model_copy(update={"stored_views": 0})
    assert Cell("row", "none", config).run_key != Cell("row", "none", stored).run_key
    without = {k: v for k, v in config.model_dump().items() if k != "stored_views"}
    old = type(config).model_construct(**without)
    assert Cell("row", "none", config).run_key == Cell("row", "none", old).run_key


@pytest.mark.parametrize("algorithm", [n for n in ALGORITHMS if n not in NEED_IMAGES])
def test_other_algorithms_train_on_stored_maps(tmp_path, weights, machine, algorithm) -> None:
    config = config_of(weights, algorithm=algorithm, steps=2, validate_every=2, image_norm=None)
    if is_closed_form(config):
        with pytest.raises(UserError):
            train_run(config, machine, tmp_path / "run")
        return
    train_run(config, machine, tmp_path / "run")
    assert evaluate_run(tmp_path / "run")


def test_the_cache_command_shows_and_deletes(solodg, tmp_path, weights, machine) -> None:
    folder = machine.cache_dir
    train_run(config_of(weights, stored_views=1), machine, tmp_path / "run")
    count = len(list((folder / "maps").glob("*.npy")))
    assert count == 2 * 3  # of each source domain, the images and one copy
    code, out, _ = solodg("cache", "--cache-dir", folder)
    assert code == 0
    assert "maps" in out
    assert f"{count} files" in out
    assert "features" in out
    code, out, _ = solodg("cache", "--cache-dir", folder, "--clear", "features")
    assert code == 0
    assert len(list((folder / "maps").glob("*.npy"))) == count
    code, out, _ = solodg("cache", "--cache-dir", folder, "--clear", "all")
    assert code == 0
    assert not list(folder.rglob("*.npy"))
    code, _, err = solodg("cache", "--cache-dir", folder, "--clear", "everything")
    assert code == 2
    assert "maps" in err


@pytest.mark.parametrize("views", [0, 2])
def test_the_duration_of_a_plan_counts_every_map_once_and_none_that_is_stored(
    weights, machine, views
) -> None:
    config = resolve(config_of(weights, stored_views=views, image_norm=(0.0, 40.0)))
    counted: set[Path] = set()
    training, storing = _measured_seconds(config, machine, counted, RowFiles())
    assert training > 0
    assert storing > 0
    assert not list(machine.cache_dir.rglob("*.npy"))
    again, storing = _measured_seconds(config, machine, counted, RowFiles())  # of the same plan
    assert again > 0
    assert storing == 0
    evaluate_run(train_run(config, machine, machine.cache_dir / "run"), machine=machine)
    assert {path for path in counted if path.exists()}  # what training and scoring stored
    missing: set[Path] = set()
    _measured_seconds(config, machine, missing, RowFiles())
    assert missing == {path for path in counted if not path.exists()}
    assert len(missing) == views  # copies of the target's images: nobody trains on them yet
