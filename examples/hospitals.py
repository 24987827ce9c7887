"""Makes a small dataset of made-up scans from several hospitals, for docs/tutorial.md.

    python examples/hospitals.py hospitals

Every image shows one lesion in tissue: `benign` has a smooth outline, `malignant` an irregular one
with spikes. Hospitals differ in what their scanners do to an image: intensity, blur, noise, dark
corners (vignette) and JPEG compression. Patients have one to three images each. Written are

    hospitals/sites.csv   path, label, domain (the hospital) and group (the patient): four hospitals
    hospitals/new.csv     the same of a fifth hospital, whose scanner no other has

and the images beside them. Nothing of it is of a real patient.
"""

import argparse
import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

SIZE = 48  # pixels a side
CLASSES = ("benign", "malignant")
Scan = NDArray[np.float64]  # (SIZE, SIZE) in [0, 1]


class Scanner(NamedTuple):
    """What the scanner of one hospital does to an image."""

    gain: float = 1.0  # of the intensity
    floor: float = 0.0  # that is added to it
    blur: float = 0.0  # standard deviation in pixels
    noise: float = 0.02  # standard deviation of the intensity
    vignette: float = 0.0  # share of the intensity that is lost in the corners
    quality: int | None = None  # of JPEG; None: not compressed


SITES = {
    "north": Scanner(),
    "south": Scanner(gain=0.55, noise=0.04),
    "east": Scanner(gain=0.8, floor=0.2, blur=1.0),
    "west": Scanner(vignette=0.7, quality=15),
}
NEW_SITE = {"harbour": Scanner(gain=0.5, floor=0.35, blur=0.7, noise=0.03, vignette=0.5)}


def main() -> None:
    """Writes both lists with their images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the lists and the images are written")
    folder = parser.parse_args().folder
    make(folder, "sites.csv", SITES, patients=60, seed=1)
    make(folder, "new.csv", NEW_SITE, patients=60, seed=2)
    print(f"Wrote {folder / 'sites.csv'} ({', '.join(SITES)}) and {folder / 'new.csv'} (harbour).")


def make(folder: Path, name: str, sites: dict[str, Scanner], *, patients: int, seed: int) -> None:
    """Writes so many patients of each class and site, and the list of all their images."""
    generator = np.random.default_rng(seed)
    rows = []
    for site, scanner in sites.items():
        for label in CLASSES:
            (folder / site / label).mkdir(parents=True, exist_ok=True)
            for number in range(patients):
                patient = f"{site}-{label[0]}{number:03d}"
                for image in range(generator.integers(1, 4)):
                    path = Path(site, label, f"{patient}-{image}.png")
                    taken(lesion(label, generator), scanner, generator).save(folder / path)
                    rows.append((path.as_posix(), label, site, patient))
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("path", "label", "domain", "group"), *rows])


def lesion(label: str, generator: np.random.Generator) -> Scan:
    """Draws one lesion in tissue, as a perfect scanner would see it."""
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE - 0.5
    middle = generator.uniform(-0.12, 0.12, 2)
    angle = np.arctan2(y - middle[0], x - middle[1])
    distance = np.hypot(y - middle[0], x - middle[1])
    stretch = 1 + generator.uniform(0, 0.25) * np.cos(2 * (angle - generator.uniform(0, np.pi)))
    spikes = np.zeros_like(angle)
    if label == "malignant":
        for waves in generator.integers(5, 11, 2):
            height = generator.uniform(0.08, 0.2)
            spikes += height * np.cos(waves * (angle - generator.uniform(0, 2 * np.pi)))
    radius = generator.uniform(0.18, 0.26) * stretch * (1 + spikes)
    inside = 1 / (1 + np.exp((distance - radius) * SIZE))  # a soft edge of about two pixels
    texture = 0.12 * (smooth(generator, 3) - 0.5) + 0.06 * (smooth(generator, 1) - 0.5)
    return np.clip(0.35 + texture + generator.uniform(0.25, 0.4) * inside, 0, 1)


def smooth(generator: np.random.Generator, blur: float) -> Scan:
    """Returns smooth noise that fills [0, 1]."""
    noise = as_image(generator.uniform(0, 1, (SIZE, SIZE))).filter(ImageFilter.GaussianBlur(blur))
    values = np.asarray(noise, dtype=np.float64)
    filled: Scan = (values - values.min()) / (values.max() - values.min())
    return filled


def taken(scan: Scan, scanner: Scanner, generator: np.random.Generator) -> Image.Image:
    """Returns the image that a scanner takes, a little different each time."""
    image = as_image(scan).filter(ImageFilter.GaussianBlur(scanner.blur))
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE - 0.5
    lost = scanner.vignette * 2 * (x**2 + y**2)  # all of it in the corners
    values = np.asarray(image, dtype=np.float64) / 255 * (1 - lost)
    values = values * scanner.gain * generator.uniform(0.9, 1.1) + scanner.floor
    values = values + generator.normal(0, scanner.noise, values.shape)
    return as_image(values) if scanner.quality is None else jpeg(as_image(values), scanner.quality)


def as_image(values: Scan) -> Image.Image:
    """Returns intensities in [0, 1] as an 8-bit grey image."""
    return Image.fromarray((np.clip(values, 0, 1) * 255).round().astype(np.uint8))


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    """Returns an image after JPEG compression."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("L")


if __name__ == "__main__":
    main()
