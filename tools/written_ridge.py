"""Does a classifier in closed form that is written for each image beat one for all images?

    python tools/written_ridge.py DATA WEIGHTS

On PACS, frozen features in four readings, 70 images of each class and domain. The classifier is
ridge regression on square-rooted features, in the 256 principal components of the sources:

    W(x) = (sum_d w_d A_d + shrinkage I)^-1 sum_d w_d B_d,   w = softmax(-sharpness distance_d)

A_d and B_d are the sums of source domain d, and distance_d is the mean squared standardised
distance of a style to the mean style of d. The style is the image's own, that of another image of
its domain, that of an image of another target domain, or none (uniform weights). Prints the
accuracy on each target domain; nothing is chosen by it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from choose_image_norm import read
from solodg.algorithms.ridge import square_rooted
from solodg.data.transforms import to_unit
from solodg.models.allocator import keep_freed_memory
from solodg.models.backbones import build_backbone
from solodg.readings import Reading

BACKBONE, SIZE, IMAGES, COMPONENTS, SHRINKAGE = "tf_efficientnet_lite0", 224, 70, 256, 1.0
READINGS = (0.0, 100.0, 1000.0, "line:300")
SHARPNESS = (0.1, 0.3, 1.0)
Floats = NDArray[np.float64]


def main() -> None:
    """Prints the accuracies of every way to weigh the source domains."""
    keep_freed_memory()
    data, weights = Path(sys.argv[1]), Path(sys.argv[2])
    names, pixels, labels, domains = read(data, IMAGES)
    found = [embed(reading, weights, pixels) for reading in READINGS]
    z, style = np.stack([f[0] for f in found]), found[0][1]
    print(f"{'weights of the source domains':40}", *(f"{name:>13}" for name in names), "  mean")
    for title, sharpness, donor in [("uniform", 0.0, "own")] + [
        (f"by the style of {donor}, {sharpness:g}", sharpness, donor)
        for sharpness in SHARPNESS
        for donor in ("the image itself", "another of its domain", "one of another domain")
    ]:
        scores = [
            accuracy(z, style, labels, domains, t, sharpness, donor) for t in range(len(names))
        ]
        print(f"{title:40}", *(f"{s:13.1f}" for s in scores), f"{np.mean(scores):6.1f}", flush=True)


@torch.inference_mode()
def embed(reading: float | str, weights: Path, pixels: torch.Tensor) -> tuple[Floats, Floats]:
    """Returns square-rooted embeddings (N, D) and styles (N, S) of the images in one reading."""
    backbone = build_backbone(BACKBONE, image_size=SIZE, weights=weights, image_norm=READINGS)
    backbone.eval()
    with backbone.reading_as([Reading.parse(reading)]):
        rows = [backbone(to_unit(batch)) for batch in pixels.split(16)]
    z = square_rooted(torch.cat([row.embedding for row in rows]))
    return z.double().numpy(), torch.cat([row.style for row in rows]).double().numpy()


def accuracy(
    z: Floats,
    style: Floats,
    y: NDArray[np.int64],
    domain: NDArray[np.int64],
    target: int,
    sharpness: float,
    donor: str,
) -> float:
    """Returns the accuracy in % on a target domain; z is (readings, N, D)."""
    sources = [d for d in range(int(domain.max()) + 1) if d != target]
    rows = np.concatenate([z[:, domain == d].reshape(-1, z.shape[2]) for d in sources])
    mean, scale = rows.mean(0), rows.std(0) + 1e-6
    _, vectors = np.linalg.eigh(np.cov(((rows - mean) / scale).T))
    project = vectors[:, -COMPONENTS:] / scale[:, None]
    a, b = [], []
    for d in sources:
        own = ((z[:, domain == d] - mean) @ project).reshape(-1, COMPONENTS)
        one_hot = np.tile(np.eye(int(y.max()) + 1)[y[domain == d]], (len(z), 1)) - 1 / (y.max() + 1)
        a.append(own.T @ own / len(own))
        b.append(own.T @ one_hot / len(own))
    tested = np.flatnonzero(domain == target)
    image = (z[:, tested].mean(0) - mean) @ project  # (T, components)
    w = domain_weights(style, domain, sources, donors(tested, domain, target, donor), sharpness)
    a_x = np.einsum("td,dij->tij", w, np.stack(a)) + SHRINKAGE * np.eye(COMPONENTS)
    b_x = np.einsum("td,dic->tic", w, np.stack(b))
    factor = torch.linalg.cholesky(torch.from_numpy(a_x))
    written = torch.cholesky_solve(torch.from_numpy(b_x), factor).numpy()  # (T, components, C)
    chosen = np.einsum("ti,tic->tc", image, written).argmax(1)
    return float(100 * (chosen == y[tested]).mean())


def donors(
    tested: NDArray[np.int64], domain: NDArray[np.int64], target: int, donor: str
) -> NDArray[np.int64]:
    """Returns the image whose style weighs the source domains for each tested image."""
    random = np.random.default_rng(1)
    if donor == "another of its domain":
        return np.roll(random.permutation(tested), 1)[np.argsort(random.permutation(len(tested)))]
    if donor == "one of another domain":
        return random.choice(np.flatnonzero(domain != target), len(tested))
    return tested


def domain_weights(
    style: Floats,
    domain: NDArray[np.int64],
    sources: list[int],
    donor: NDArray[np.int64],
    sharpness: float,
) -> Floats:
    """Returns the weight of each source domain for each donor, (T, domains)."""
    pool = style[np.isin(domain, sources)]
    standard = (style - pool.mean(0)) / (pool.std(0) + 1e-6)
    centres = np.stack([standard[domain == d].mean(0) for d in sources])
    distance = ((standard[donor][:, None] - centres) ** 2).mean(2)
    power = np.exp(-sharpness * (distance - distance.min(1, keepdims=True)))
    weights: Floats = power / power.sum(1, keepdims=True)
    return weights


if __name__ == "__main__":
    main()
