"""Decoding: every kind of image file a user may bring, as real files."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from solodg.data import images
from solodg.data.decode import BadImageError, decode
from solodg.data.images import ImageFiles, MemoryBudget
from solodg.errors import UserError
from solodg.pixels import DecodeLimits, TooManyPixelsError, decode_pixels, pixels_of

GRADIENT = np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1))  # (30, 40): dark to light


def saved(tmp_path: Path, image: Image.Image, name: str, **options) -> Path:
    image.save(tmp_path / name, **options)
    return tmp_path / name


def is_gradient(pixels: torch.Tensor) -> bool:
    row = pixels.float().mean((0, 1))
    return bool(row[0] < 40 and row[-1] > 215 and (row.diff() > -3).all())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "P", "RGBA", "LA", "1", "I;16", "I", "F"])
def test_every_mode_becomes_eight_bit_pixels(tmp_path: Path, mode: str, channels: int) -> None:
    if mode == "I;16":
        image = Image.fromarray(GRADIENT.astype(np.uint16) * 257)
    elif mode in ("I", "F"):
        image = Image.fromarray(GRADIENT).convert(mode)
    else:
        image = Image.fromarray(GRADIENT).convert("RGB").convert(mode)
    ending = "tif" if mode in ("CMYK", "I", "F") else "png"
    pixels = decode(saved(tmp_path, image, f"x.{ending}"), channels=channels, size=16)
    assert pixels.shape == (channels, 16, 16)
    assert pixels.dtype == torch.uint8
    assert mode == "1" or is_gradient(pixels)


@pytest.mark.parametrize("top", [255, 1023, 4095, 65535])
def test_a_scan_of_fewer_bits_keeps_its_contrast(tmp_path: Path, top: int) -> None:
    image = Image.fromarray((GRADIENT.astype(float) / 255 * top).astype(np.uint16))
    assert is_gradient(decode(saved(tmp_path, image, "x.png"), channels=1, size=16))


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_floats_may_lie_in_the_unit_range(tmp_path: Path, top: float) -> None:
    image = Image.fromarray((GRADIENT / 255 * top).astype(np.float32))
    assert is_gradient(decode(saved(tmp_path, image, "x.tif"), channels=1, size=16))


def test_exif_orientation_is_honoured(tmp_path: Path) -> None:
    image = Image.fromarray(GRADIENT).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying, to be shown upright
    upright = decode(saved(tmp_path, image, "x.jpg", exif=exif, quality=95), channels=3, size=16)
    assert is_gradient(upright.transpose(1, 2))
    assert not is_gradient(upright)


def test_transparency_is_put_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert decode(saved(tmp_path, image, "x.png"), channels=3, size=8).min() == 255


def test_the_first_frame_of_an_animation_is_used(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), level) for level in (250, 5)]
    path = saved(tmp_path, frames[0], "x.gif", save_all=True, append_images=frames[1:])
    assert decode(path, channels=1, size=8).min() > 240


def test_resizing_equals_pil(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT), "x.png")
    expected = np.asarray(Image.fromarray(GRADIENT).resize((16, 16), Image.Resampling.BILINEAR))
    assert np.array_equal(decode(path, channels=1, size=16)[0].numpy(), expected)


def test_files_bytes_and_images_in_memory_agree(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT), "x.png")
    with Image.open(path) as image:
        results = [
            decode(source, channels=3, size=12) for source in (path, path.read_bytes(), image)
        ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "unknown format"), (b"not an image", "unknown format")]
)
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(BadImageError, match=rf"x\.png.*{reason}"):
        decode(tmp_path / "x.png", channels=3, size=8)


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_truncated_file_is_named(tmp_path: Path, ending: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    path = saved(tmp_path, Image.fromarray(noise), f"x.{ending}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BadImageError, match=rf"x\.{ending}"):
        decode(path, channels=3, size=8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_damaged_bytes_are_an_image_or_a_bad_image(kind: str) -> None:
    """Whatever Pillow stumbles over, a reader of uploads hears of one kind of error."""
    file, generator = io.BytesIO(), np.random.default_rng(0)
    Image.fromarray(GRADIENT).convert("RGB").save(file, kind)
    whole = np.frombuffer(file.getvalue(), np.uint8)
    limits = DecodeLimits(max_pixels=10**6)
    for _ in range(60):
        damaged = whole.copy()
        places = generator.integers(0, len(damaged), generator.integers(1, 12))
        damaged[places] = generator.integers(0, 256, len(places))
        cut = generator.integers(0, len(damaged) + 1) if generator.random() < 0.3 else len(damaged)
        try:
            pixels = decode_pixels(damaged[:cut].tobytes(), channels=3, size=8, limits=limits)
        except BadImageError:
            continue
        assert pixels.shape == (3, 8, 8)


def test_strangers_may_not_send_everything(tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(GRADIENT), "x.png")
    with pytest.raises(TooManyPixelsError, match="40 x 30"):
        decode_pixels(path, channels=1, size=8, limits=DecodeLimits(max_pixels=1199))
    icon = saved(tmp_path, Image.fromarray(GRADIENT), "x.ico")
    assert decode_pixels(icon, channels=1, size=8).shape == (1, 8, 8)
    with pytest.raises(BadImageError, match="unknown format"):
        decode_pixels(icon, channels=1, size=8, limits=DecodeLimits(max_pixels=10**6))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadImageError, match="no such file"):
        decode(tmp_path / "x.png", channels=3, size=8)


def files(tmp_path: Path, count: int, budget: int) -> ImageFiles:
    for i in range(count):
        Image.new("L", (8, 8), 10 * i).save(tmp_path / f"{i}.png")
    names = [f"{i}.png" for i in range(count)]
    return ImageFiles(tmp_path, names, channels=1, size=8, budget=MemoryBudget(budget))


def test_images_are_decoded_once_while_memory_allows(tmp_path: Path) -> None:
    images = files(tmp_path, 6, budget=4 * 64)  # room for four of six
    first = images.take(range(6))
    assert first[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    for i in range(6):
        Image.new("L", (8, 8), 200).save(tmp_path / f"{i}.png")
    again = images.take(range(6))[:, 0, 0, 0].tolist()
    assert sum(value == 200 for value in again) == 2  # only these were read again


def test_a_subset_shares_the_budget_and_nothing_else(tmp_path: Path) -> None:
    images = files(tmp_path, 4, budget=3 * 64)
    part = images.subset([3, 1])
    assert part.take([0, 1])[:, 0, 0, 0].tolist() == [30, 10]
    assert part.paths == ["3.png", "1.png"]
    images.take(range(4))
    assert len(images._kept) == 1


def test_a_subset_brings_what_is_decoded_already(tmp_path: Path) -> None:
    images = files(tmp_path, 3, budget=3 * 64)
    images.take(range(3))
    for path in tmp_path.iterdir():
        path.unlink()
    assert images.subset([2, 0]).take([0, 1])[:, 0, 0, 0].tolist() == [20, 0]


def test_keys_follow_the_content_and_not_the_size(tmp_path: Path) -> None:
    images = files(tmp_path, 2, budget=0)
    Image.new("L", (8, 8), 5).save(tmp_path / "0.bmp")
    Image.new("L", (8, 8), 9).save(tmp_path / "1.bmp")
    images.paths = ["0.bmp"]
    before = images.keys()
    (tmp_path / "0.bmp").write_bytes((tmp_path / "1.bmp").read_bytes())
    assert images.keys() == before  # read once, as the pixels are
    assert images.subset([0]).keys() != before
    (tmp_path / "0.bmp").unlink()
    assert images.subset([0]).keys() == ["0.bmp:unreadable"]


def test_bad_images_are_found_beforehand(tmp_path: Path) -> None:
    images = files(tmp_path, 5, budget=10**6)
    (tmp_path / "2.png").write_bytes(b"broken")
    done = []
    bad = images.bad_images(done.append)
    assert list(bad) == [2]
    assert "2.png" in str(bad[2])
    assert sum(done) == 5


def test_few_files_wait_for_the_threads_however_many_there_are(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(2000)]  # which do not exist
    files = ImageFiles(tmp_path, names, channels=1, size=8, budget=MemoryBudget(0))
    waiting = []
    bad = files.bad_images(lambda count: waiting.append(images._decoders()._work_queue.qsize()))
    assert sorted(bad) == list(range(2000))
    assert max(waiting) <= 256
    assert len(files.keys()) == 2000


def test_an_image_without_pixels_and_a_pipe_are_refused(tmp_path: Path) -> None:
    for shape in ((0, 4), (4, 0, 3)):
        with pytest.raises(UserError, match="no pixels"):
            pixels_of(np.zeros(shape, np.float32), channels=3, size=8)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadImageError, match="not a regular file"):
        pixels_of(tmp_path / "pipe.png", channels=3, size=8)
    images = ImageFiles(tmp_path, ["pipe.png"], channels=3, size=8, budget=MemoryBudget(0))
    assert images.keys() == ["pipe.png:unreadable"]
