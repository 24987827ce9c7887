"""The page as people meet it: a real browser drops real files on a real server."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import solodg
from browser import CHROMIUM, DRIVER, MISSING, Browser, browser
from serving_process import listening, served
from solodg.storage import append_line

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def model(digits_onnx: Path):
    return solodg.load(digits_onnx)


@pytest.fixture
def files(digits: np.ndarray, tmp_path: Path) -> list[Path]:
    """Two digits and a file that is none."""
    for number in (0, 1):
        Image.fromarray(digits[number, 0]).save(tmp_path / f"digit-{number}.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "digit-0.png").read_bytes()[:60])
    return [tmp_path / name for name in ("digit-0.png", "broken.png", "digit-1.png")]


def show(page: Browser, url: str, width: int = 1280) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.driver.get(url)


def choose(page: Browser, files: list[Path]) -> None:
    page.driver.find_element("id", "files").send_keys("\n".join(map(str, files)))


def wait(page: Browser, condition: str):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page.driver, 15).until(lambda _: page.run(f"return {condition}"))


ARTICLE = "[...document.querySelectorAll('article')].find(a => a.textContent.includes('{}'))"


def test_dropped_files_get_classes_pictures_and_errors(chromium, model, files) -> None:
    with listening(model) as url:
        show(chromium, url)
        wait(chromium, "document.getElementById('model').textContent.includes('small_cnn')")
        choose(chromium, files)
        wait(chromium, "document.getElementById('status').textContent.includes('3 images done')")
        for path in (files[0], files[2]):
            expected = model.predict(path)
            article = ARTICLE.format(path.name)
            assert chromium.run(f"return {article}.querySelector('h2').textContent") == (
                expected.label
            )
            written = chromium.run(f"return {article}.querySelector('.certainty').textContent")
            assert f"probability {expected.probability:.3f}" in written
            rows = chromium.run(
                f"return [...{article}.querySelectorAll('tbody tr')].map(r => r.innerText)"
            )
            assert len(rows) == 10
            best = 100 * expected.before[expected.label]
            assert f"{best:.1f}%" in rows[0]  # before adapting, beside after
            preview = f"{article}.querySelector('img')"
            assert wait(chromium, f"{preview}.naturalWidth") == 32
        broken = ARTICLE.format("broken.png")
        shown = chromium.run(f"return {broken}.querySelector('[role=alert]').innerText")
        assert "cannot read image broken.png" in shown
        assert all(address.startswith((url, "blob:", "data:")) for address in chromium.requests())


def test_the_page_shows_recorded_scores_or_that_there_are_none(
    chromium, model, digits_run, tmp_path
) -> None:
    summary = "document.querySelector('#scores summary').textContent"
    with listening(model) as url:
        show(chromium, url)
        assert wait(chromium, summary) == "Scores: none are recorded"
    scores = {"overall": {"accuracy": {"value": 0.715, "low": 0.641, "high": 0.781}},
              "classes": {"<b>": {"images": 7, "auc": {"value": 0.9, "low": None, "high": None}}},
              "resampled": "groups"}  # fmt: skip
    line = {"adapter": "none", "dataset": "x", "domain": "harbour", "role": "new-site",
            "protocol": "p", "metrics": {"accuracy": 0.715, "images": 300},
            "scores": scores}  # fmt: skip
    run = shutil.copytree(digits_run, tmp_path / "run")
    append_line(run / "results.jsonl", line)
    with listening(solodg.load(run)) as url:
        show(chromium, url, width=360)
        wanted = "Scores: accuracy 71.5 (64.1-78.1)% on harbour (new site)"
        assert wait(chromium, summary) == wanted
        chromium.driver.find_element("css selector", "#scores summary").click()
        rows = chromium.run(
            "return [...document.querySelectorAll('#scores tbody tr')].map(r => r.innerText)"
        )
        assert chromium.run("return document.documentElement.scrollWidth") <= 360
    assert rows[0].split("\t")[:2] == ["harbour (new site)", "71.5 (64.1-78.1)"]
    assert rows[1].split("\t") == ["<b>", "-", "-", "0.900", "-", "7"]


def test_the_keyboard_is_enough_and_a_phone_is_wide_enough(chromium, model, files) -> None:
    from selenium.webdriver.common.keys import Keys

    with listening(model) as url:
        show(chromium, url, width=360)
        chromium.driver.find_element("tag name", "body").send_keys(Keys.TAB)
        assert chromium.run("return document.activeElement.id") == "files"
        choose(chromium, files)
        wait(chromium, "document.getElementById('status').textContent.includes('done')")
        assert chromium.run("return document.documentElement.scrollWidth") <= 360


def test_a_token_is_asked_for_on_the_page(chromium, model, files) -> None:
    with listening(model, token="abc") as url:
        show(chromium, url)
        wait(chromium, "!document.getElementById('token-form').hidden")
        chromium.driver.find_element("id", "token").send_keys("abc\n")
        wait(chromium, "document.getElementById('model').textContent.includes('small_cnn')")
        choose(chromium, files[:1])
        said = wait(chromium, "document.querySelector('article h2').textContent")
    assert said == model.predict(files[0]).label


def test_a_served_run_explains_what_adapting_did(chromium, digits_run, files) -> None:
    with served(digits_run) as server:
        chromium.requests()  # those of other tests
        show(chromium, server.url)
        wait(chromium, "document.getElementById('model').textContent.includes('small_cnn')")
        choose(chromium, [files[0]])
        wait(chromium, "document.getElementById('status').textContent.includes('done')")
        figure = "document.querySelector('article .figure img')"
        assert wait(chromium, f"{figure}?.naturalWidth") > 300
        assert files[0].name in chromium.run(f"return {figure}.alt")
        assert all(a.startswith((server.url, "blob:", "data:")) for a in chromium.requests())
