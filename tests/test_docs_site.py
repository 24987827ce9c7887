"""The site of the documentation: built strictly, whole, and without anything from a network."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from browser import CHROMIUM, DRIVER, MISSING, Browser, browser
from solodg.bench.plan import Plan
from solodg.bench.row import Row
from solodg.cli import app
from solodg.data.image_table import COLUMNS
from solodg.runs.config import RunConfig
from solodg.runs.machine import Machine
from solodg.runs.model_info import ModelInfo
from solodg.runs.stream import Stream
from solodg.types import Record

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import docs_site  # noqa: E402

FETCHED = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?((?:https?:)?//[^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_command_field_and_public_name(site: Path) -> None:
    commands = (site / "reference" / "cli.html").read_text()
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        assert f"solodg {command.name}</" in commands or f"solodg {command.name}<" in commands
        for option in (p for p in command.params if p.name != "help"):
            assert re.search(rf"<code>[^<]*{option.opts[0]}\b", commands), option.opts
    fields = (site / "reference" / "configuration.html").read_text()
    for name in {**RunConfig.model_fields, **Machine.model_fields}:
        assert f"<code>{name}</code>" in fields
    names = (site / "reference" / "api.html").read_text()
    for name in ("train", "load", "Model.predict", "Model.evaluate", "SoloClassifier.fit"):
        assert f'id="solodg.{name}"' in names
    assert "[bold]" not in commands + fields


def test_no_page_fetches_anything_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert [found for page in pages for found in FETCHED.findall(page.read_text())] == []


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)
def test_pages_opened_from_disk_fit_a_phone_and_can_be_searched(site: Path) -> None:
    with browser() as window:
        for page in ("reference/cli", "results"):
            window.open(site / f"{page}.html", width=390, dark=True)
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")
            widest = "return Math.max(...[...document.querySelectorAll('table')].map(t => {}))"
            frame = "t.closest('.md-typeset__scrollwrap').getBoundingClientRect().right"
            inside = window.run(widest.format(frame))
            assert inside <= 390
            assert {url.split(":")[0] for url in window.requests()} <= {"file", "data"}
        assert window.run(widest.format("t.scrollWidth")) > 390  # it scrolls inside its frame
        assert window.run("return document.body.dataset.mdColorScheme") == "slate"
        assert found_by_search(window, "image norm") > 0
        assert window.console() == []


def found_by_search(window: Browser, text: str) -> int:
    """Types into the search of the page and returns the number of pages that it lists."""
    script = """
        const [text, done] = arguments, field = document.querySelector('.md-search__input');
        document.querySelector('#__search').click();  // the index is read then
        const ask = () => {
            const found = document.querySelectorAll('.md-search-result__item').length;
            if (found) return done(found);
            field.focus(); field.value = text;
            field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
            setTimeout(ask, 100);
        };
        ask();
    """
    window.driver.set_script_timeout(60)
    return window.driver.execute_async_script(script, text)


@pytest.fixture
def small_site(tmp_path: Path) -> Iterator[Path]:
    """One page that is built by the rules of the site, without its theme and plugins."""
    rules = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["validation"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[up](#title)\n")
    content = {"site_name": "small", "validation": rules, "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(content))
    return tmp_path


def build_strictly(folder: Path) -> None:
    config = load_config(str(folder / "mkdocs.yml"), strict=True, site_dir=str(folder / "out"))
    build(config)


def test_a_right_page_is_built_strictly(small_site: Path) -> None:
    build_strictly(small_site)
    assert (small_site / "out" / "index.html").is_file()


@pytest.mark.parametrize("link", ["missing.md", "#missing", "/absolute.md", "folder/missing"])
def test_a_wrong_link_ends_the_build(small_site: Path, link: str) -> None:
    (small_site / "docs" / "index.md").write_text(f"# Title\n\n[wrong]({link})\n")
    with pytest.raises(Abort):
        build_strictly(small_site)


def test_a_missing_docstring_is_a_warning_that_mkdocs_counts(tmp_path: Path, monkeypatch) -> None:
    text = 'class A:\n    """Is one."""\n    def f(self): ...\n    def _g(self): ...\n'
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").write_text(text)
    assert docs_site.undocumented("some.A", tmp_path) == ["some.A.f"]
    assert docs_site.undocumented("solodg.Model") == []
    assert docs_site.log.name.startswith("mkdocs.")


def test_links_to_the_repository_become_links_of_the_site() -> None:
    text = "[a](../../CONTRIBUTING.md#habits) [b](../use.md) [c](https://x.org) [d](no.md)"
    found = docs_site.with_links_of_site(text, "docs/howto/own.md", "howto/own.md")
    assert found == "[a](../contributing.md#habits) [b](../use.md) [c](https://x.org) [d](no.md)"


def rows(heading: str) -> set[str]:
    """The names in the first column of the tables under a heading of the page on files."""
    text = (ROOT / "docs" / "reference" / "files.md").read_text()
    own = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", own, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_on_files_has_the_keys_that_the_code_has() -> None:
    assert rows("model.json") == set(ModelInfo.model_fields)
    assert rows("Records") == set(Record.model_fields)
    assert rows("Plan") == {*Plan.model_fields, *Row.model_fields, "datasets"}
    assert rows("Manifest") == set(COLUMNS)
    text = (ROOT / "docs" / "reference" / "files.md").read_text()
    assert ", ".join(f"`{name}`" for name in Stream.model_fields) in text


def test_the_page_on_files_names_the_files_of_a_run() -> None:
    finished = {path.name for path in (ROOT / "tests" / "data" / "run_format_4").glob("*.*")}
    assert len(finished) > 6
    assert finished - {"prediction.json"} <= rows("The folder of a run")
