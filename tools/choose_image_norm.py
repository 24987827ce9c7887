"""How much of an image's own statistics? Chosen on PACS by leaving one source domain out.

    python tools/choose_image_norm.py DATA WEIGHTS

For each target domain, and each choice of `--image-norm`: mean accuracy of a logistic regression on
frozen features over the three ways to train on two source domains and to score the third. The
target domain takes no part in its own choice. 80 images of each class and domain. Of several
readings, all are trained on, and the mean is scored.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from solodg.data import Loading, dataset_spec
from solodg.data.transforms import to_unit
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone

BACKBONE, SIZE, IMAGES = "tf_efficientnet_lite0", 224, 80
CHOICES = ((0,), (3000,), (1000,), (300,), (0, 300), (3000, 300), (0, 3000, 300))


def main() -> None:
    """Prints the accuracies of every choice."""
    keep_freed_memory()
    data, weights = Path(sys.argv[1]), Path(sys.argv[2])
    names, pixels, labels, domains = read(data)
    numbers = sorted({number for choice in CHOICES for number in choice})
    embedded = {number: embed(number, weights, pixels) for number in numbers}
    for choice in CHOICES:
        z = np.stack([embedded[number] for number in choice])
        scores = [leave_one_out(z, labels, domains, left_out) for left_out in range(len(names))]
        line = ", ".join(f"{n} {100 * s:.1f}" for n, s in zip(names, scores, strict=True))
        print(f"image norm {choice}: {line}, mean {100 * np.mean(scores):.1f}", flush=True)


def read(
    data: Path, images: int = IMAGES
) -> tuple[list[str], torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Returns domain names, pixels (N, 3, H, W), labels (N,) and domains (N,) of some images.

    These are `images` of each class and domain, drawn by a fixed seed.
    """
    dataset = dataset_spec("pacs").load(Loading(data, SIZE, 3))
    names = list(dataset.domain_names)
    pixels, labels, domains = [], [], []
    for number, part in enumerate(dataset.targets(names).values()):
        random = np.random.default_rng(0)
        members = [np.flatnonzero(part.labels == c) for c in np.unique(part.labels)]
        chosen = np.concatenate([random.permutation(own)[:images] for own in members])
        pixels.append(part.images.take(chosen))
        labels.append(part.labels[chosen])
        domains.append(np.full(len(chosen), number))
    return names, torch.cat(pixels), np.concatenate(labels), np.concatenate(domains)


@torch.inference_mode()
def embed(source_pixels: float, weights: Path, pixels: torch.Tensor) -> NDArray[np.float32]:
    """Returns the embeddings of the images, (N, D), with one setting of image norm."""
    backbone = build_backbone(
        BACKBONE, image_size=SIZE, weights=weights, image_norm=float(source_pixels)
    ).eval()
    return torch.cat([backbone.embed(to_unit(batch)) for batch in pixels.split(32)]).numpy()


def leave_one_out(  # z: (readings, images, D)
    z: NDArray[np.float32], y: NDArray[np.int64], domain: NDArray[np.int64], target: int
) -> float:
    """Returns the mean accuracy over the source domains, each left out once."""
    scores = []
    for scored in set(domain.tolist()) - {target}:
        train, test = (domain != target) & (domain != scored), domain == scored
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))
        classifier.fit(np.concatenate(z[:, train]), np.tile(y[train], len(z)))
        scores.append(classifier.score(z[:, test].mean(0), y[test]))
    return float(np.mean(scores))


if __name__ == "__main__":
    main()
