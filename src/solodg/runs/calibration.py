"""After training: what tells how far a model can be trusted, computed from source images alone."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from solodg.algorithms import Algorithm
from solodg.algorithms.base import Outputs
from solodg.data import LabelledImages, SourceData
from solodg.models.extractor import recorded_features
from solodg.runs.checkpoint import WEIGHTS
from solodg.runs.metrics import predict
from solodg.runs.novelty import Described, Novelty, save_novelty
from solodg.runs.opened_data import input_batches
from solodg.runs.predictions import Predictions
from solodg.runs.target_images import give_target_images, split_for_target_images
from solodg.runs.temperature import fit_temperature, save_temperature
from solodg.storage.tensors import read_tensors
from solodg.types import Features

_TRAINING_IMAGES, _VALIDATION_IMAGES = 500, 1000  # about; at least one of each class and domain


def calibrate(
    folder: Path,
    algorithm: Algorithm,
    source: SourceData,
    device: torch.device,
    *,
    seed: int,
    leave_out: bool,
) -> None:
    """Writes novelty and temperature of the selected model of a run to its folder.

    `algorithm` reads what `source` holds; it gets the selected weights. `leave_out` says whether
    the domains are ones that can stand for a new one.
    """
    state, _ = read_tensors(folder / WEIGHTS)
    algorithm.load_state_dict(state, strict=False)  # it may lack frozen stages
    algorithm.to(device).eval()
    train, _ = _described(algorithm, _some(source.train, _TRAINING_IMAGES, seed), device)
    chosen = _some(source.val, _VALIDATION_IMAGES, seed)
    parts = split_for_target_images(algorithm, chosen)
    found = [_described(algorithm, part, device) for part in parts]
    described, predictions = zip(*found, strict=True)
    val = Described(*(np.concatenate(arrays) for arrays in zip(*described, strict=True)))
    save_novelty(folder, Novelty.fit(train, val, leave_out=leave_out))
    save_temperature(folder, fit_temperature(Predictions.concatenate(predictions), val.labels))


def _some(part: LabelledImages, count: int, seed: int) -> LabelledImages:
    """Draws about `count` images, about as many of each class and domain."""
    cells = len(np.unique(np.stack([part.labels, part.domains]), axis=1).T)
    return part.balanced(max(1, count // max(1, cells)), seed)


def _described(
    algorithm: Algorithm, part: LabelledImages, device: torch.device
) -> tuple[Described, Predictions]:
    """Predicts images; returns the features that their prediction is made of, too."""
    give_target_images(algorithm, part, device)
    embeddings, styles = [], []

    def outputs(x: Tensor) -> Outputs:
        with recorded_features() as seen:
            found = algorithm.outputs(x)
        embedding, style = Features(*(torch.stack(p).mean(0) for p in zip(*seen, strict=True)))
        embeddings.append(embedding.double().cpu().numpy())
        styles.append(style.double().cpu().numpy())
        return found

    predictions = predict(outputs, input_batches(part), device=device)
    described = Described(
        np.concatenate(embeddings), np.concatenate(styles), part.labels, part.domains
    )
    return described, predictions
