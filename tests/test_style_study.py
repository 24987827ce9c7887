"""Whose style: the five figures, against the model asked directly."""

from pathlib import Path

import pytest
import torch

from solodg import checkpoint
from solodg.config import Machine, RunConfig
from solodg.errors import UserError
from solodg.progress import NoProgress
from solodg.run import train_run
from solodg.score import evaluate_run
from solodg.style_study import FRAMES, STYLES, Observed, _accuracies, frame_study, style_study
from solodg.types import Features


def trained(folder: Path, **values) -> Path:
    config = RunConfig(
        dataset="toy",
        targets=("sky", "ash"),
        backbone="small_cnn",
        steps=30,
        batch_size=8,
        **values,
    )
    return train_run(config, Machine(accelerator="cpu"), folder)


@pytest.mark.parametrize("algorithm", ["solo", "solo_plus"])
def test_own_style_is_the_model_itself(tmp_path: Path, algorithm: str) -> None:
    folder = trained(tmp_path / "run", algorithm=algorithm)
    found = style_study(folder, None, NoProgress())
    assert set(found) == {"sky", "ash"}
    model, _ = checkpoint.load(folder)
    assert all(set(values) == set(STYLES) for values in found.values())
    assert all(0 <= v <= 1 for values in found.values() for v in values.values())
    assert found == style_study(folder, None, NoProgress())  # the same seed
    # Accuracy by the mean classifier; records average sampled ones, so they may differ a little.
    records = {r.domain: r.metrics["accuracy"] for r in evaluate_run(folder) if r.role == "target"}
    assert all(abs(found[d]["own"] - records[d]) < 0.05 for d in found)
    assert model is not None


class StyleReader(torch.nn.Module):
    """Says the class that the style says; its prior says class 0."""

    def logits(self, observed: Features) -> torch.Tensor:
        return observed.style

    def prior_logits(self, observed: Features) -> torch.Tensor:
        return torch.eye(3)[torch.zeros(len(observed.style), dtype=torch.long)]


def test_each_kind_takes_the_style_it_names() -> None:
    labels = torch.arange(3).repeat(200)
    seen = Observed(Features(torch.zeros(600, 2), torch.eye(3)[labels]), labels)
    foreign = torch.eye(3)[torch.full((50,), 1)]
    known = torch.eye(3)[torch.full((10,), 2)]
    found = _accuracies(StyleReader(), seen, foreign, known, torch.Generator().manual_seed(0))
    assert found["own"] == 1.0
    assert 0.2 < found["same domain"] < 0.46
    assert all(found[name] == pytest.approx(1 / 3) for name in ("other domain", "mean", "prior"))


def test_a_method_without_styles_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reads no style"):
        style_study(trained(tmp_path / "run", algorithm="erm"), None, NoProgress())


def test_own_frame_is_the_model_itself_and_others_are_others(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", algorithm="solo_plus")
    model, _ = checkpoint.load(folder)
    torch.nn.init.normal_(model.frame.write.weight, std=0.3)  # frames that differ a lot
    checkpoint.save_weights(folder, model, step=30, validation={})
    found = frame_study(folder, None, NoProgress())
    styles = style_study(folder, None, NoProgress())
    assert set(found) == {"sky", "ash"}
    for domain, accuracies in found.items():
        assert tuple(accuracies) == FRAMES
        assert accuracies["own"] == pytest.approx(styles[domain]["own"])
        assert len(set(accuracies.values())) > 1


def test_without_frames_there_is_nothing_to_ask(tmp_path: Path) -> None:
    assert frame_study(trained(tmp_path / "run", algorithm="solo"), None, NoProgress()) is None
