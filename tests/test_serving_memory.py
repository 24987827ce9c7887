"""The server's memory: large images are decoded within a budget, and their memory returns."""

import io
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import solodg
from serving_process import listening, served
from solodg import pixels
from solodg.pixels import decode_pixels
from solodg.serving.decode_budget import DecodeBudget


def flat(width: int, height: int, kind: str = "PNG", mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), 90).save(file, kind, **options)
    return file.getvalue()


def post(url: str, *images: bytes) -> httpx.Response:
    files = [("images", (f"{i}.png", image)) for i, image in enumerate(images)]
    return httpx.post(f"{url}/predict", files=files, timeout=60)


@pytest.fixture(scope="module")
def model(digits_onnx: Path):
    return solodg.load(digits_onnx)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whenever an image is decoded: the pixels of all images that are at that moment."""
    seen: list[int] = []
    current, lock, convert = [0], threading.Lock(), pixels._to_pixels

    def watched(image, *rest):
        count = image.width * image.height
        with lock:
            current[0] += count
            seen.append(current[0])
        time.sleep(0.05)
        try:
            return convert(image, *rest)
        finally:
            with lock:
                current[0] -= count

    monkeypatch.setattr(pixels, "_to_pixels", watched)
    monkeypatch.setattr("os.cpu_count", lambda: 8)  # as many threads decode
    return seen


def test_images_of_all_requests_are_decoded_within_the_budget(model, decoding) -> None:
    """Real requests at once; without the budget all eight would be decoded together."""
    image = flat(1000, 1000, mode="L")
    with listening(model, decode_pixels=2_500_000) as url, ThreadPoolExecutor(4) as crowd:
        answers = list(crowd.map(lambda _: post(url, image, image), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(decoding) == 8
    assert max(decoding) == 2_000_000


def test_an_image_above_the_budget_is_decoded_alone(model, decoding) -> None:
    large, small = flat(2000, 1000, mode="L"), flat(500, 500, mode="L")
    with listening(model, decode_pixels=1_000_000) as url:
        assert post(url, small, large, small, large, small).status_code == 200
    assert max(decoding) == 2_000_000
    assert sorted(set(decoding))[-2] <= 750_000


def test_a_large_image_is_not_overtaken_for_ever() -> None:
    budget, order = DecodeBudget(10), []

    def decode(pixels: int) -> None:
        with budget.reserve(pixels):
            order.append(pixels)
            time.sleep(0.05)

    threads = [threading.Thread(target=decode, args=(n,)) for n in (6, 10, 1, 1, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert order == [6, 10, 1, 1, 1]
    assert budget.used == 0


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("PNG", {}, 800 * 600),
        ("JPEG", {}, 100 * 75),  # decoded at an eighth
        ("JPEG", {"progressive": True}, 800 * 600),  # holds all coefficients
    ],
)
def test_an_image_counts_with_the_pixels_that_it_takes(kind, options, expected) -> None:
    counted: list[int] = []
    decode_pixels(flat(800, 600, kind, **options), channels=3, size=32, reserve=counted.append)
    assert counted == [expected]


def test_after_a_bad_image_the_others_of_its_request_are_not_decoded(model, decoding) -> None:
    image = flat(1000, 1000, mode="L")
    with listening(model, decode_pixels=1_000_000) as url:
        assert post(url, b"bad", *[image] * 20).status_code == 422
        assert post(url, flat(8, 8)).status_code == 200
    assert len(decoding) < 15


def test_requests_may_not_hold_more_bytes_than_the_queue_has(model) -> None:
    """A second request is refused while another holds most of the bytes, and then admitted."""
    whole = np.random.default_rng(0).bytes(100_000)
    sent, release = threading.Event(), threading.Event()

    def slowly():
        yield whole
        sent.set()
        release.wait(10)
        yield b"end"

    with listening(model, max_bytes=150_000, queue_bytes=160_000) as url:
        with ThreadPoolExecutor(1) as other:

            def start():
                sent.clear()
                request = other.submit(httpx.post, f"{url}/predict", content=slowly(), timeout=20)
                assert sent.wait(10)
                return request

            first, deadline = start(), time.monotonic() + 10
            while (second := httpx.post(f"{url}/predict", content=whole)).status_code != 429:
                assert time.monotonic() < deadline
                if first.done():  # the other way round: it came while this one held the bytes
                    assert first.result().status_code == 429
                    first = start()
            assert "bytes of requests" in second.json()["error"]
            assert second.headers["Retry-After"] == "1"
            assert httpx.post(f"{url}/predict", content=flat(8, 8)).status_code == 200
            release.set()
            assert first.result().status_code == 422  # noise is no image
        assert httpx.post(f"{url}/predict", content=whole).status_code == 422


def test_a_request_within_its_own_limit_is_admitted_whatever_the_queue(model) -> None:
    with listening(model, max_bytes=100_000, queue_bytes=1) as url:
        assert httpx.post(f"{url}/predict", content=flat(8, 8)).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_images_take_little_memory_and_return_it(digits_onnx: Path) -> None:
    image = flat(6000, 4000)  # 24 megapixels, 96 MB as Pillow holds them
    broken = image[: len(image) * 9 // 10]
    with served(digits_onnx, "--decode-pixels", "30000000") as server:
        process = Path(f"/proc/{server.process.pid}")

        def megabytes(field: str) -> int:
            return int(re.search(rf"{field}:\s+(\d+)", (process / "status").read_text())[1]) // 1024

        assert post(server.url, flat(64, 64)).status_code == 200
        before = megabytes("VmRSS")
        with ThreadPoolExecutor(3) as crowd:
            answers = list(crowd.map(lambda _: post(server.url, image, image), range(3)))
        assert {answer.status_code for answer in answers} == {200}
        assert post(server.url, broken).status_code == 422
        assert megabytes("VmHWM") < before + 200  # not every image, and not several copies
        deadline = time.monotonic() + 10
        while megabytes("VmRSS") > before + 80:
            assert time.monotonic() < deadline, megabytes("VmRSS") - before
            time.sleep(0.1)
