"""Views of an image: each keeps its shape and range, and does what it says."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.ndimage import gaussian_filter
from torch.nn import functional as F

from solodg.models.backbones import build_backbone
from solodg.models.views import VIEWS, blur
from solodg.readings import VIEW_NAMES, Reading, readings_of


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", VIEW_NAMES)
def test_every_view_gives_images_of_the_same_shape_for_each_alone(name: str, channels: int) -> None:
    x = torch.rand(3, channels, 40, 28, generator=torch.Generator().manual_seed(0))
    seen = VIEWS[name](x)
    assert seen.shape == x.shape
    assert seen.min() >= 0
    assert seen.max() <= 1
    torch.testing.assert_close(VIEWS[name](x[1:2]), seen[1:2])


def test_there_is_a_function_for_every_name() -> None:
    assert tuple(VIEWS) == VIEW_NAMES


def test_blur_is_a_gaussian() -> None:
    x = torch.rand(1, 1, 30, 30, dtype=torch.double)
    expected = gaussian_filter(x[0, 0].numpy(), 2.0, mode="nearest", truncate=3.0)
    np.testing.assert_allclose(blur(x, 2.0)[0, 0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("height", "width"), [(224, 224), (40, 28), (7, 50), (2, 2)])
def test_blur_is_two_convolutions_of_the_image_with_its_border_repeated(height, width) -> None:
    generator = torch.Generator().manual_seed(0)
    x, sigma = torch.rand(3, 1, height, width, generator=generator), width / 32
    reach = min(int(3 * sigma + 0.5), min(height, width) - 1)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum())[None, None]
    padded = F.pad(x, (reach,) * 4, mode="replicate")
    expected = F.conv2d(F.conv2d(padded, kernel[:, :, None]), kernel[..., None])
    torch.testing.assert_close(blur(x, sigma), expected)


def test_the_line_view_has_gradients_after_inference() -> None:
    x = torch.rand(1, 3, 24, 24)
    with torch.inference_mode():
        VIEWS["line"](x)
    VIEWS["line"](x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_grey_and_flip_are_pillows() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    grey = np.asarray(image.convert("L")) / 255
    np.testing.assert_allclose(VIEWS["grey"](x)[0, 0].numpy(), grey, atol=1 / 255)
    mirrored = torch.from_numpy(np.array(ImageOps.mirror(image))).permute(2, 0, 1)[None] / 255
    assert torch.equal(VIEWS["flip"](x), mirrored)


def test_a_line_drawing_is_white_where_nothing_changes_and_dark_at_a_line() -> None:
    x = torch.full((1, 3, 64, 64), 0.3)
    torch.testing.assert_close(VIEWS["line"](x), torch.ones_like(x), atol=0.02, rtol=0)
    x[:, :, 31:33] = 0.05
    drawn = VIEWS["line"](x)
    assert drawn[:, :, 31:33].max() < 0.2
    assert drawn[:, :, :10].min() > 0.9
    bright = VIEWS["line"](x * 2)  # shading is gone
    torch.testing.assert_close(bright[:, :, :10], drawn[:, :, :10], atol=0.05, rtol=0)


def test_zoom_enlarges_the_middle() -> None:
    x = torch.zeros(1, 1, 50, 50)
    x[:, :, 20:30, 20:30] = 1
    assert VIEWS["zoom"](x).mean() > 1.4 * x.mean()


def test_a_backbone_reads_each_view_and_draws_one_in_training() -> None:
    readings = readings_of((0.0, "line:50", "flip:0"))
    backbone = build_backbone("small_cnn", image_size=32, image_norm=(0.0, "line:50", "flip:0"))
    x = torch.rand(4, 3, 32, 32)
    backbone.eval()
    each = backbone.embed_each(x)
    for row, reading in zip(each, readings, strict=True):
        with backbone.reading_as([reading]):
            torch.testing.assert_close(backbone.embed(x), row)
    torch.testing.assert_close(backbone.embed(x), each.mean(0))
    backbone.train().freeze_norm()
    many = backbone.embed(x[:1].expand(60, -1, -1, -1))
    which = torch.cdist(many, each[:, 0]).argmin(1)
    assert set(which.tolist()) == {0, 1, 2}
    assert torch.cdist(many, each[:, 0]).min(1).values.max() < 1e-3


@pytest.mark.parametrize("value", ["300", "line:300", "flip:0", "zoom:1.5"])
def test_a_reading_is_written_as_it_is_read(value: str) -> None:
    assert str(Reading.parse(value)) == value
    assert Reading.parse(Reading.parse(value).value) == Reading.parse(value)


@pytest.mark.parametrize("value", ["", "line", "line:", "-1", "nan", "inf", "sketch:3", "line:x"])
def test_what_is_no_reading_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"reading|view|source pixels"):
        Reading.parse(value)
