"""A model in the browser: a static page in a real Chromium gives the answers of `predict`."""

import base64
import io
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin
from sklearn.datasets import load_sample_images

import solodg
from browser import CHROMIUM, DRIVER, MISSING, Browser, browser
from solodg.errors import UserError
from solodg.pixels import decode_pixels
from solodg.predict.web_page import find_runtime

RUNTIME = Path(sys.prefix) / "npm" / "node_modules" / "onnxruntime-web"  # `make test` puts it there
needs_runtime = pytest.mark.skipif(
    not RUNTIME.is_dir(), reason="no npm on this machine: ONNX Runtime Web is not installed"
)
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@contextmanager
def static_server(folder: Path, log: Path) -> Iterator[str]:
    """`python -m http.server` at a free port; yields its address. Its requests are in `log`."""
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        port = re.search(rb"port (\d+)", process.stdout.readline())
        assert port
        yield f"http://127.0.0.1:{port[1].decode()}/"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def page(digits_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "page"
    solodg.load(digits_onnx).export_web(folder, RUNTIME)
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


ARTICLE = "[...document.querySelectorAll('article')].find(a => a.textContent.includes('{}'))"


def wait(chromium: Browser, condition: str):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(chromium.driver, 60).until(lambda _: chromium.run(f"return {condition}"))


@needs_runtime
@needs_browser
def test_a_page_in_the_browser_gives_the_answers_of_predict_and_sends_nothing(
    chromium: Browser, page: Path, digits_onnx: Path, digits: np.ndarray, tmp_path: Path
) -> None:
    model = solodg.load(digits_onnx)
    files = [tmp_path / f"digit-{number}.png" for number in (3, 140, 320)]
    for path in files:
        digit = Image.fromarray(digits[int(path.stem.split("-")[1]), 0])
        digit.resize((45, 61)).save(path)
    broken = tmp_path / "broken.png"
    broken.write_bytes(files[0].read_bytes()[:60])
    chromium.console(), chromium.requests()
    with static_server(page, tmp_path / "requests.log") as url:
        chromium.driver.get(url)
        chosen = "\n".join(map(str, [*files, broken]))
        chromium.driver.find_element("id", "files").send_keys(chosen)
        wait(chromium, "document.getElementById('status').textContent.includes('4 images done')")
        assert not chromium.run("return document.getElementById('unserved').offsetHeight")
        asked, said = chromium.requests(), chromium.console()
    for path in files:
        answer = model.predict(path)
        article = ARTICLE.format(path.name)
        rows = chromium.run(
            f"return [...{article}.querySelectorAll('tbody tr')].map(row => "
            "[row.cells[0].textContent, ...[...row.cells].slice(1).map(cell => cell.title)])"
        )
        assert rows[0][0] == answer.label
        for name, before, after in rows:
            assert float(after) == pytest.approx(answer.probabilities[name], abs=5e-5)
            assert float(before) == pytest.approx(answer.before[name], abs=5e-5)
        shown = chromium.run(f"return {article}.querySelector('.certainty').textContent")
        assert shown == (
            f"probability {answer.probability:.3f}, uncertainty {answer.uncertainty:.3f}, "
            f"novelty {answer.novelty:.2f}"
        )
    problems = chromium.run(
        "return [...document.querySelectorAll('.problem[role=alert]')].map(p => p.innerText)"
    )
    assert [text for text in problems if text] == [
        "cannot read image broken.png: damaged, or of a kind that this browser cannot read"
    ]
    assert said == []  # nothing was blocked, nothing failed
    assert {address.split(":")[0] for address in asked} <= {"http", "blob", "data"}
    assert all(a.startswith(url) for a in asked if a.startswith("http"))
    requests = re.findall(r'"([A-Z]+) (\S+)', (tmp_path / "requests.log").read_text())
    assert {method for method, _ in requests} == {"GET"}
    assert {path.lstrip("/") for _, path in requests} <= {
        "", *(str(path.relative_to(page)) for path in page.rglob("*"))
    }  # fmt: skip


@needs_runtime
@needs_browser
def test_the_policy_of_the_page_stops_what_would_leave_it(
    chromium: Browser, page: Path, tmp_path: Path
) -> None:
    script = """
        const [other, done] = arguments, stopped = [];
        document.addEventListener('securitypolicyviolation', e => {
            stopped.push(e.effectiveDirective); if (stopped.length === 5) done(stopped.sort()); });
        fetch(other, {method: 'POST', body: 'image'}).catch(() => {});
        navigator.sendBeacon(other, 'image');
        new Image().src = '/picture.png?image';
        for (const [tag, text] of [['script', '1'], ['style', 'p {}']]) {
            const made = document.createElement(tag);
            made.textContent = text;
            document.head.append(made);
        }
    """
    with static_server(page, tmp_path / "log") as url:
        chromium.driver.get(url)
        wait(chromium, "document.getElementById('status').textContent === 'Ready.'")
        stopped = chromium.driver.execute_async_script(script, url.replace("127.0.0.1", "[::1]"))
    assert stopped == ["connect-src", "connect-src", "img-src", "script-src-elem", "style-src-elem"]


def png(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def jpeg(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92, **options)
    return out.getvalue()


def pictures() -> dict[str, tuple[bytes, float, int]]:
    """By name: a file, and the mean and the largest difference allowed, in grey levels."""
    photo = Image.fromarray(load_sample_images().images[1])  # 640 x 427
    small = photo.resize((101, 67))
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, (90, 70, 4), dtype=np.uint8)
    scan = (np.asarray(small.convert("L"), dtype=np.uint16) * 11 + 3).astype(np.uint16)
    gamma = PngImagePlugin.PngInfo()
    gamma.add(b"gAMA", (100_000).to_bytes(4, "big"))
    turned = Image.Exif()
    turned[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    palette = small.quantize(16)
    colour16 = _png16_colour(generator.integers(0, 65536, (40, 30, 3), dtype=np.uint16))
    exact, near = (0.0, 0), (0.2, 1)
    return {
        "colour": (png(photo), *exact),
        "grey": (png(small.convert("L")), *exact),
        "tiny": (png(small.resize((5, 3))), *exact),
        "one size": (png(small.resize((48, 48))), *exact),
        "palette": (png(palette), *exact),
        "gamma": (png(small, pnginfo=gamma), *exact),
        "profile": (png(small, icc_profile=profile), *exact),
        "16 bits grey": (png(Image.fromarray(scan)), *exact),
        "16 bits full": (png(Image.fromarray(scan * 20)), *exact),
        "16 bits colour": (colour16, *exact),
        "transparent": (png(Image.fromarray(noise)), *near),
        "grey and alpha": (png(Image.fromarray(noise).convert("LA")), *near),
        "palette with a hole": (png(palette, transparency=3), *near),
        "small jpeg": (jpeg(small), *near),
        "turned jpeg": (jpeg(small, exif=turned), *near),
        "jpeg": (jpeg(photo), 0.5, 10),  # decoded at half the size by `predict`
        "turned large jpeg": (jpeg(photo, exif=turned), 0.5, 10),
        "gif": (_saved(small, "GIF"), *near),
        "bmp": (_saved(small, "BMP"), *exact),
    }


def _saved(image: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def _png16_colour(values: np.ndarray) -> bytes:
    """A PNG of 16 bits in colour, which Pillow reads and does not write; every filter is used."""
    height, width, _ = values.shape
    rows = values.astype(">u2").tobytes()
    rows = np.frombuffer(rows, np.uint8).reshape(height, width * 6).astype(int)
    lines = []
    for y in range(height):
        left = np.concatenate([np.zeros(6, int), rows[y, :-6]])
        above = rows[y - 1] if y else np.zeros_like(rows[y])
        corner = np.concatenate([np.zeros(6, int), above[:-6]])
        distances = np.abs([above - corner, left - corner, left + above - 2 * corner])
        paeth = np.choose(distances.argmin(0), [left, above, corner])
        guess = [np.zeros_like(left), left, above, (left + above) // 2, paeth][y % 5]
        lines.append(bytes([y % 5]) + ((rows[y] - guess) % 256).astype(np.uint8).tobytes())

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    data = zlib.compress(b"".join(lines))
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


DECODE = """
    const [text, model, done] = arguments;
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    import('/pixels.js').then(({decode}) => decode(new File([bytes], 'image'), model))
        .then(({pixels}) => done(btoa(String.fromCharCode(...pixels))))
        .catch(error => done(error.message));
"""


def decoded(chromium: Browser, content: bytes, model: dict) -> np.ndarray | str:
    """The pixels that the page makes of a file, or its error."""
    found = chromium.driver.execute_async_script(DECODE, base64.b64encode(content).decode(), model)
    try:
        return np.frombuffer(base64.b64decode(found, validate=True), np.uint8)
    except ValueError:
        return found


@needs_runtime
@needs_browser
def test_the_browser_reads_the_pixels_that_predict_reads(
    chromium: Browser, page: Path, tmp_path: Path
) -> None:
    files, found = pictures(), {}
    with static_server(page, tmp_path / "log") as url:
        chromium.driver.get(url)
        for name, (content, *_) in files.items():
            for channels, size in ((3, 48), (1, 33), (3, 85)):
                model = {"channels": channels, "image_size": size, "window": None}
                pixels = decoded(chromium, content, model)
                assert isinstance(pixels, np.ndarray), (name, pixels)
                expected = decode_pixels(content, channels=channels, size=size).astype(int)
                difference = np.abs(pixels.reshape(expected.shape) - expected)
                found[name, channels, size] = (difference.mean(), difference.max())
    wrong = {
        key: (mean, largest)
        for key, (mean, largest) in found.items()
        if mean > files[key[0]][1] or largest > files[key[0]][2]
    }
    assert wrong == {}


@needs_runtime
@needs_browser
def test_a_window_is_applied_and_what_it_cannot_be_applied_to_is_refused(
    chromium: Browser, page: Path, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 5000, (60, 44), dtype=np.uint16)
    scan = png(Image.fromarray(values))
    model = {"channels": 1, "image_size": 32, "window": [311.5, 3970.0]}
    with static_server(page, tmp_path / "log") as url:
        chromium.driver.get(url)
        pixels, colour, text = (
            decoded(chromium, content, model)
            for content in (scan, png(Image.new("RGB", (9, 9))), b"II*\0 a TIFF file")
        )
    expected = decode_pixels(scan, channels=1, size=32, window=(311.5, 3970.0))
    np.testing.assert_array_equal(np.reshape(pixels, expected.shape), expected)
    assert "reads grey values from 311.5 to 3970" in colour
    assert text == "cannot read image image: not a JPEG, PNG, WebP, GIF or BMP file"


@needs_runtime
@needs_browser
def test_opened_as_a_file_the_page_says_what_to_do(chromium: Browser, page: Path) -> None:
    chromium.open(page / "index.html")
    shown = chromium.run("return document.getElementById('unserved').innerText")
    assert "python -m http.server" in shown


def test_a_missing_runtime_and_a_folder_in_use_are_errors_before_work(
    solodg, digits_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, said = solodg("export", digits_onnx, "--web", tmp_path / "page")
    assert code == 2
    assert "npm install onnxruntime-web" in " ".join(said.split())
    code, _, said = solodg("export", digits_onnx)
    assert (code, "--web DIR" in said) == (2, True)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "index.html").write_text("mine")
    code, _, said = solodg("export", digits_onnx, "--web", tmp_path / "used")
    assert (code, "exists already" in said) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    with pytest.raises(UserError, match="does not hold it"):
        find_runtime(tmp_path)


def test_the_runtime_is_found_in_a_folder_above_as_npm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "node_modules" / "onnxruntime-web"
    (package / "dist").mkdir(parents=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (package / "dist" / name).write_text("")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert find_runtime(None) == package
