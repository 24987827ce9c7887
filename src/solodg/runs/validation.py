"""The score of a model in training, on source validation images."""

import numpy as np
import torch

from solodg.algorithms import Algorithm
from solodg.data import LabelledImages
from solodg.errors import UserError
from solodg.runs.metrics import metrics, predict
from solodg.runs.opened_data import input_batches
from solodg.runs.predictions import NotFiniteError, Predictions
from solodg.runs.target_images import give_target_images, split_for_target_images
from solodg.runs.training_state import Score
from solodg.types import Batch


def validate(
    algorithm: Algorithm, val: LabelledImages, centres: LabelledImages, device: torch.device
) -> Score:
    """Finalises the algorithm on source images and scores it on source validation images."""
    _finalize(algorithm, centres, device)
    predicted, parts = [], split_for_target_images(algorithm, val)
    for part in parts:
        give_target_images(algorithm, part, device)
        try:
            predicted.append(predict(algorithm.probabilities, input_batches(part), device=device))
        except NotFiniteError as error:
            raise UserError(
                "training has diverged: the model predicts NaN. Try a lower --learning-rate or "
                "--backbone-learning-rate."
            ) from error
    if algorithm.target_images:
        _finalize(algorithm, centres, device)  # so that the saved model has seen no domain
    labels = np.concatenate([part.labels for part in parts])
    scored = metrics(Predictions.concatenate(predicted), labels)
    return Score(scored["accuracy"], -scored["nll"])


@torch.inference_mode()
def _finalize(algorithm: Algorithm, centres: LabelledImages, device: torch.device) -> None:
    batches = (Batch(*(t.to(device) for t in batch)) for batch in input_batches(centres))
    algorithm.finalize(batches)
