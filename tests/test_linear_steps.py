"""Linear steps (LP-FT): at first all but the backbone is trained, then everything."""

import math
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric

from solodg.bench.cell import Cell
from solodg.errors import UserError
from solodg.runs import folds
from solodg.runs.build import make_schedule
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.fit import Schedule, fit, start, update
from solodg.runs.train import train_run
from solodg.storage import read_lines
from tests.test_training import SameEpisode, new_erm

CPU = Machine(accelerator="cpu")


def small(**values) -> RunConfig:
    fast = {"batch_size": 4, "context_images": 1, "centre_images": 2, "steps": 4}
    defaults = {"dataset": "toy", "targets": ("sky",), "algorithm": "erm", "backbone": "small_cnn"}
    return RunConfig(**defaults | fast | values)


@pytest.mark.parametrize("decay", ["constant", "step", "cosine"])
def test_the_decay_counts_the_steps_after_the_linear_ones(decay) -> None:
    whole = Schedule(15, 1, 1.0, 1.0, 0.0, 0, decay=decay, linear_steps=5)
    rest = Schedule(10, 1, 1.0, 1.0, 0.0, 0, decay=decay)
    expected = [1.0] * 5 + [rest.factor(step) for step in range(1, 11)]
    assert [whole.factor(step) for step in range(1, 16)] == expected


def test_cosine_after_linear_steps_against_the_formula() -> None:
    schedule = Schedule(6, 1, 1.0, 1.0, 0.0, 0, decay="cosine", linear_steps=2)
    found = [schedule.factor(step) for step in range(1, 7)]
    assert found == pytest.approx([1, 1, *((1 + math.cos(math.pi * k / 4)) / 2 for k in range(4))])


def test_linear_steps_are_two_trainings_by_hand() -> None:
    """Against one Adam for the head and a new one for the backbone, which starts later."""
    schedule = Schedule(5, 5, 1e-2, 1e-3, 0.1, 0, linear_steps=2)
    fabric, loader = Fabric(accelerator="cpu", devices=1), SameEpisode()
    algorithm, by_hand = new_erm(), new_erm().train()
    state = start(fabric, algorithm, schedule)
    inside = {id(p) for p in by_hand.backbone.parameters()}
    head = [p for p in by_hand.parameters() if id(p) not in inside]
    of_head = torch.optim.Adam(head, lr=1e-2, weight_decay=0.1, fused=True)
    of_backbone = torch.optim.Adam(
        by_hand.backbone.parameters(), lr=1e-3, weight_decay=0.1, fused=True
    )
    for step, _ in fit(fabric, state, loader, lambda x, generator: x, schedule):
        by_hand.zero_grad()
        by_hand.losses(loader.episode)["loss"].backward()
        of_head.step()
        if step > 2:
            of_backbone.step()
        pairs = zip(algorithm.parameters(), by_hand.parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in pairs)


def test_held_parameters_keep_their_values_and_have_no_moments() -> None:
    algorithm = new_erm().train()
    optimizer = torch.optim.Adam(algorithm.parameters(), lr=1e-2, weight_decay=0.1)
    held = list(algorithm.backbone.parameters())
    before = [p.detach().clone() for p in held]
    update(algorithm, optimizer, SameEpisode().episode, held=held)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
    assert not any(p in optimizer.state for p in held)
    assert len(optimizer.state) == len(list(algorithm.parameters())) - len(held)


def test_linear_steps_must_leave_steps_for_the_backbone() -> None:
    assert resolve(small(linear_steps=3)).linear_steps == 3
    with pytest.raises(UserError, match=r"training has 4 steps.* at most 3"):
        resolve(small(linear_steps=4))
    with pytest.raises(UserError, match="training has 2000 steps"):
        resolve(small(linear_steps=2000, steps=None))


def test_linear_steps_exclude_a_frozen_backbone_and_a_classifier_in_closed_form() -> None:
    with pytest.raises(UserError, match="--freeze-backbone to the end"):
        resolve(small(linear_steps=2, freeze_backbone=True, pretrained=True))
    with pytest.raises(UserError, match="--linear-steps: the ridge classifier is solved"):
        resolve(small(linear_steps=2, algorithm="ridge", pretrained=True, steps=None))


def test_no_linear_steps_have_the_key_of_before() -> None:
    keys = {
        steps: Cell("x", "none", resolve(small(linear_steps=steps))).run_key
        for steps in (None, 0, 2)
    }
    assert keys[None] == keys[0] != keys[2]
    assert make_schedule(resolve(small())).linear_steps == 0


def test_leaving_one_out_works_with_linear_steps(tmp_path: Path) -> None:
    config = small(steps=4, validate_every=2, linear_steps=2, select="leave-one-out")
    folder = train_run(config, CPU, tmp_path / "run")
    lines = read_lines(folder / "leave-one-out" / "0-ash" / "metrics.jsonl")
    assert [line["step"] for line in lines if "val_accuracy" in line] == [2, 4]


def test_folds_of_the_evidence_have_the_same_share_of_linear_steps(tmp_path, monkeypatch) -> None:
    seen = []

    def noted(config):
        seen.append((config.linear_steps, config.steps))
        return make_schedule(config)

    monkeypatch.setattr(folds, "make_schedule", noted)
    train_run(
        small(steps=20, linear_steps=10, image_norm="auto", batch_size=8), CPU, tmp_path / "run"
    )
    assert len(seen) == 3
    assert all(linear == 10 * steps // 20 < steps for linear, steps in seen)
