"""The server, over real sockets: right predictions, clear errors, and it survives both."""

import io
import re
import signal
import socket
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import solodg
from serving_process import Server, listening, served
from solodg.predict.onnx import OnnxPredictor
from solodg.runs.predictions import Prediction, Predictions, uncertainty
from solodg.serving.batching import DIGITS, TOLERANCE, near_rounding_boundary
from solodg.serving.schemas import image_prediction


def encoded(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def as_reported(answer: Prediction, name: str | None = None) -> dict:
    return image_prediction(name, answer).model_dump(by_alias=True)


@pytest.fixture(scope="module")
def server(digits_onnx: Path):
    with served(digits_onnx) as running:
        yield running


@pytest.fixture(scope="module")
def model(digits_onnx: Path):
    return solodg.load(digits_onnx)


@pytest.fixture
def picture(digits: np.ndarray) -> bytes:
    return encoded(digits[3, 0])


def post(server: Server | str, content: bytes, **options) -> httpx.Response:
    url = server if isinstance(server, str) else server.url
    return httpx.post(f"{url}/predict", content=content, timeout=20, **options)


def test_one_image_as_the_body_and_several_in_a_form(server, model, digits) -> None:
    images = [encoded(image[0]) for image in digits[:5]]
    expected = model.predict(images)
    for kind in ("image/png", "application/octet-stream", None):
        headers = {"Content-Type": kind} if kind else {}
        (answer,) = post(server, images[0], headers=headers).json()["predictions"]
        assert answer == as_reported(model.predict(images[0]))
    files = [("images", (f"{i}.png", image)) for i, image in enumerate(images)]
    answers = httpx.post(f"{server.url}/predict", files=files).json()["predictions"]
    assert [a["image"] for a in answers] == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    assert [a["class"] for a in answers] == [e.label for e in expected]
    assert set(answers[0]) == {"image", "class", "probability", "uncertainty", "novelty",
                               "probabilities", "before"}  # fmt: skip


@pytest.mark.parametrize("kind", ["onnx", "run"])
def test_answers_do_not_depend_on_the_micro_batch(kind, digits_run, digits_onnx, digits) -> None:
    """Many at once get, digit for digit, what `predict` says of each alone."""
    model = solodg.load(digits_onnx if kind == "onnx" else digits_run)
    images = [encoded(image[0]) for image in digits[::4]]
    alone = [as_reported(model.predict(image)) for image in images]
    with listening(model) as url, httpx.Client(timeout=30) as client:

        def ask(image: bytes) -> dict:
            return client.post(f"{url}/predict", content=image).json()["predictions"][0]

        with ThreadPoolExecutor(24) as crowd:
            answers = list(crowd.map(ask, images))
        metrics = client.get(f"{url}/metrics").text
    assert answers == alone
    batches = float(re.search(r"solodg_batch_images_count (\S+)", metrics)[1])
    assert batches < 0.8 * len(images)  # or nothing was batched


@pytest.mark.parametrize("kind", ["onnx", "run"])
def test_a_batch_changes_probabilities_by_less_than_the_tolerance(
    kind, digits_run, digits_onnx, digits
) -> None:
    model = solodg.load(digits_onnx if kind == "onnx" else digits_run)
    alone = [model.compute(image[None]) for image in digits[:64]]
    for batch in (2, 7, 64):
        for start in range(0, 64, batch):
            together = model.compute(digits[:64][start : start + batch])
            expected = Predictions.concatenate(alone[start : start + batch])
            assert np.abs(together.probabilities - expected.probabilities).max() < TOLERANCE
            assert np.abs(together.before - expected.before).max() < TOLERANCE


probabilities = st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda p: sum(p) > 0)


@given(probabilities, st.lists(st.floats(-1, 1), min_size=6, max_size=6))
def test_far_from_a_rounding_boundary_a_batch_changes_no_digit(values, shifts) -> None:
    """Whatever moves by less than the tolerance, class and digits stay, or it is computed again."""

    def prediction(row: np.ndarray) -> Prediction:
        named = dict(zip("abcdef", row.tolist(), strict=False))
        best = max(named, key=named.__getitem__)
        certainty = float(uncertainty(np.clip(row, 0, 1)))
        return Prediction(best, named[best], certainty, named, None)

    row = np.array(values) / sum(values)
    moved = np.clip(row + TOLERANCE * np.array(shifts[: len(row)]), 0, 1)
    if not near_rounding_boundary(prediction(row)):
        assert as_reported(prediction(moved)) == as_reported(prediction(row))


def test_a_small_probability_moves_the_uncertainty_a_lot_and_is_computed_again() -> None:
    rare = 3.107e-5
    row = np.array([1 - rare, rare])
    moved = np.array([1 - rare + 0.99e-6, rare - 0.99e-6])
    assert round(float(uncertainty(row)), DIGITS) != round(float(uncertainty(moved)), DIGITS)
    named = dict(zip("ab", row.tolist(), strict=True))
    assert near_rounding_boundary(Prediction("a", row[0], float(uncertainty(row)), named, None))


def test_a_number_at_a_rounding_boundary_is_computed_again() -> None:
    edge = 0.25 + 0.5 * 10**-DIGITS + TOLERANCE / 2  # a rounding boundary
    assert near_rounding_boundary(Prediction("b", 1 - edge, 0.5, {"a": edge, "b": 1 - edge}))
    assert near_rounding_boundary(Prediction("a", 0.5, 0.5, {"a": 0.5, "b": 0.5}))
    assert not near_rounding_boundary(Prediction("a", 0.9, 0.5, {"a": 0.9, "b": 0.1}))


# Bad images, and images that only look bad


def truncated(image: bytes) -> bytes:
    return image[: len(image) // 2]


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("x.png", b"x")
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
BAD = {
    "zero bytes": (b"", 422, "unknown format"),
    "truncated png": (truncated(encoded(NOISE)), 422, "cannot read image"),
    "truncated jpeg": (truncated(encoded(NOISE, "JPEG")), 422, "cannot read image"),
    "text": (b"What is in this image?", 422, "unknown format"),
    "archive": (archive(), 422, "unknown format"),
    "drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "unknown format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 422, "unknown format"),
    "many pixels": (encoded(Image.new("1", (9000, 9000))), 413, "9000 x 9000"),
    "a bomb": (encoded(Image.new("1", (30000, 30000))), 413, "pixels"),
    "many bytes": (bytes(21 * 1024**2), 413, "bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_refused_with_the_reason(server, picture: bytes, case: str) -> None:
    content, status, reason = BAD[case]
    response = post(server, content, headers={"Content-Type": "application/octet-stream"})
    assert response.status_code == status
    assert reason in response.json()["error"]
    assert post(server, picture).status_code == 200  # the process lives


def test_a_bad_image_among_good_ones_is_named(server, picture: bytes) -> None:
    files = [("images", ("good.png", picture)), ("images", ("bad.png", truncated(picture)))]
    response = httpx.post(f"{server.url}/predict", files=files)
    assert response.status_code == 422
    assert "bad.png" in response.json()["error"]


def test_unusual_images_are_answered_like_the_plain_one(server, digits) -> None:
    plain = Image.fromarray(digits[3, 0]).resize((64, 64))
    grey = np.asarray(plain)
    turned = Image.Exif()
    turned[0x0112] = 6  # stored lying, to be shown upright
    frames = {"save_all": True, "append_images": [Image.new("L", (64, 64))]}
    cases = {
        "png": encoded(plain),
        "16 bits": encoded(Image.fromarray(grey.astype(np.uint16) * 257)),
        "cmyk": encoded(plain.convert("RGB").convert("CMYK"), "TIFF"),
        "transparent": encoded(plain.convert("RGBA")),
        "animated": encoded(plain, "GIF", **frames),
        "turned": encoded(plain.rotate(90), "TIFF", exif=turned),
        "palette": encoded(plain.convert("P")),
        "webp": encoded(plain.convert("RGB"), "WEBP", lossless=True),
    }
    answers = {n: post(server, c).json()["predictions"][0] for n, c in cases.items()}
    for name, answer in answers.items():
        assert answer["class"] == answers["png"]["class"], name
        assert answer["probability"] == pytest.approx(answers["png"]["probability"], abs=0.02), name
    jpeg = encoded(plain.convert("CMYK"), "JPEG", quality=95)
    assert post(server, jpeg).status_code == 200


# Limits


@pytest.mark.parametrize(
    ("content_type", "content", "status"),
    [
        ("application/json", b"{}", 415),
        ("application/x-www-form-urlencoded", b"a=b", 415),
        ("multipart/form-data; boundary=x", b"no form", 400),
        ("multipart/form-data", b"--x", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
    ],
)
def test_what_is_no_upload_is_refused(server, content_type, content, status) -> None:
    response = post(server, content, headers={"Content-Type": content_type})
    assert response.status_code == status
    assert response.json()["error"]


def test_text_in_a_form_is_refused(server, picture: bytes) -> None:
    url = f"{server.url}/predict"
    answer = httpx.post(url, files={"images": ("x.png", picture)}, data={"more": "text"})
    assert answer.status_code == 400


def test_too_many_images_and_a_body_without_announced_length(model, picture: bytes) -> None:
    with listening(model, max_images=2, max_bytes=1000) as url:
        many = [("images", (f"{i}.png", b"x")) for i in range(3)]
        response = httpx.post(f"{url}/predict", files=many)
        assert response.status_code == 413
        assert "2 images" in response.json()["error"]

        def chunks():
            for _ in range(20):
                yield bytes(100)

        response = httpx.post(f"{url}/predict", content=chunks())
        assert response.status_code == 413
        assert "1,000 bytes" in response.json()["error"]


class Slow(OnnxPredictor):
    """Waits for a sign before it computes."""

    def compute(self, pixels):
        if not self.sign.wait(10):
            raise RuntimeError("no sign came")
        return super().compute(pixels)


@pytest.fixture
def slow(digits_onnx: Path) -> Slow:
    model = Slow.load(digits_onnx)
    model.sign = threading.Event()
    return model


def test_beyond_the_admission_limit_requests_get_429_until_there_is_room(
    slow: Slow, picture: bytes
) -> None:
    with listening(slow, queue=3, max_images=1) as url, ThreadPoolExecutor(8) as crowd:
        waiting = [crowd.submit(post, url, picture) for _ in range(8)]
        while sum(w.done() for w in waiting) < 5:
            time.sleep(0.01)
        refused = [w.result() for w in waiting if w.done()]
        assert {r.status_code for r in refused} == {429}
        assert refused[0].headers["Retry-After"] == "1"
        slow.sign.set()
        assert sorted(w.result().status_code for w in waiting) == [200] * 3 + [429] * 5
        assert post(url, picture).status_code == 200


def test_a_request_that_times_out_gets_503_and_frees_its_slot(slow: Slow, picture: bytes) -> None:
    with listening(slow, seconds=0.3) as url:
        response = post(url, picture)
        assert response.status_code == 503
        assert "0.3 seconds" in response.json()["error"]
        slow.sign.set()
        assert post(url, picture).status_code == 200
        assert "solodg_images_inside 0.0" in httpx.get(f"{url}/metrics").text


def half_sent(url: str, content: bytes) -> socket.socket:
    """A connection that has sent its headers and half of its body."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    length = f"Content-Length: {len(content)}"
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    connection.sendall(head + content[: len(content) // 2])
    return connection


def test_an_upload_that_never_ends_is_ended(model, picture: bytes) -> None:
    with listening(model, seconds=0.3) as url, half_sent(url, picture) as connection:
        assert b"408" in connection.recv(4096).splitlines()[0]


def test_a_failing_model_is_an_error_without_traceback(slow: Slow, picture: bytes) -> None:
    slow.sign = None  # so that computing fails
    with listening(slow) as url:
        response = post(url, picture)
        assert response.status_code == 500
        assert response.json() == {"error": "the server failed; see its log."}
        slow.sign = threading.Event()
        slow.sign.set()
        assert post(url, picture).status_code == 200


def test_a_token_is_required(model, picture: bytes) -> None:
    with listening(model, token="secret word") as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(url).status_code == 200  # the page, which asks for the token
        for path in ("model", "metrics"):
            assert httpx.get(f"{url}/{path}").status_code == 401
        for wrong in ("", "Bearer", "Bearer other", "Basic c2VjcmV0", "Bearer secret"):
            response = post(url, picture, headers={"Authorization": wrong})
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
        right = {"Authorization": "Bearer secret word"}
        assert post(url, picture, headers=right).status_code == 200


# The process


def test_stopping_finishes_what_was_taken(digits_onnx: Path, digits: np.ndarray) -> None:
    image = encoded(digits[0, 0])
    with served(digits_onnx) as server, half_sent(server.url, image) as connection:
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")  # nobody new is taken in
        connection.sendall(image[len(image) // 2 :])
        assert b"200 OK" in connection.recv(65536).splitlines()[0]
        assert server.process.wait(10) == 0


def test_an_exported_model_is_served_without_torch_and_on_loopback(server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    maps = Path(f"/proc/{server.process.pid}/maps")
    if maps.exists():
        loaded = maps.read_text()
        assert "onnxruntime" in loaded
        assert "libtorch" not in loaded


def test_the_token_comes_from_a_file(digits_onnx: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    with served(digits_onnx, "--token-file", str(tmp_path / "token")) as server:
        assert httpx.get(f"{server.url}/model").status_code == 401
        allowed = {"Authorization": "Bearer abc"}
        assert httpx.get(f"{server.url}/model", headers=allowed).status_code == 200


def test_the_server_says_what_it_serves_and_counts(server, model, picture: bytes) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    shown = httpx.get(f"{server.url}/model").json()
    assert shown["model"]["classes"] == model.classes
    assert shown["name"] == "digits.onnx"
    assert shown["runtime"] == "ONNX Runtime"
    post(server, picture)
    counted = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'solodg_requests_total{path="/predict",status="200"} [1-9]', counted)
    httpx.get(f"{server.url}/no-such-page")
    counted = httpx.get(f"{server.url}/metrics").text
    assert "no-such-page" not in counted


def test_pages_need_nothing_from_elsewhere(server) -> None:
    for path in ("", "docs", "page.js", "results.js", "page.css"):
        response = httpx.get(f"{server.url}/{path}")
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert not re.search(r"https?://", response.text)
    described = httpx.get(f"{server.url}/docs").text
    assert all(word in described for word in ("POST /predict", "GET /health", "429"))
    missing = httpx.get(f"{server.url}/nowhere")
    assert (missing.status_code, missing.json()) == (404, {"error": "Not Found"})


def test_a_run_draws_what_adapting_to_an_image_did(digits_run, server, picture: bytes) -> None:
    files = [("images", ("a.png", picture)), ("images", ("b.png", picture))]
    with served(digits_run) as running:
        assert httpx.get(f"{running.url}/model").json()["explains"]
        answer = httpx.post(f"{running.url}/explain", content=picture, timeout=30)
        two = httpx.post(f"{running.url}/explain", files=files, timeout=30)
    assert answer.headers["content-type"] == "image/svg+xml"
    expected = solodg.load(digits_run).predict(picture)
    assert f"after: {expected.label} ({expected.probability:.2f})" in answer.text
    assert two.status_code == 400
    assert "2 images" in two.json()["error"]
    refused = httpx.post(f"{server.url}/explain", content=picture)  # an ONNX file
    assert refused.status_code == 404
    assert "folder of a run" in refused.json()["error"]


def test_a_server_on_loopback_answers_only_to_names_of_this_machine(server) -> None:
    for host in ("evil.example", "evil.example:80", "10.0.0.1"):
        refused = httpx.get(f"{server.url}/model", headers={"Host": host})
        assert refused.status_code == 403
        assert "this machine" in refused.json()["error"]
    for host in ("localhost", "127.0.0.1:9999", "[::1]:8000"):
        assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200
