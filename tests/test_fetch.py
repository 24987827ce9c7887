"""Datasets from mirrors: a real server that breaks off, sends something else, or is not there."""

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from solodg.data import DATASETS
from solodg.data.fetch import RemoteFile, fetch_file
from solodg.data.recipes import RECIPES, unpack
from solodg.errors import UserError
from solodg.progress import NoProgress

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
AWAY = "http://127.0.0.1:9/x.bin"  # nobody listens


class Mirror(ThreadingHTTPServer):
    """Files by path. One below `/broken` ends after 100,000 bytes; `/rude` knows no ranges."""

    files: dict[str, bytes]
    ranges: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append((self.path, asked))
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if asked and not self.path.startswith("/rude"):
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        kind = "text/html" if content.startswith(b"<html") else "application/octet-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        rest = content[start:]
        self.wfile.write(rest[:100_000] if self.path.startswith("/broken") else rest)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror(("127.0.0.1", 0), Handler) as server:
        server.files, server.ranges = {}, []
        for name in ("broken", "rude", "good"):
            server.files[f"/{name}/x.bin"] = CONTENT
        server.files["/other/x.bin"] = CONTENT[::-1]
        server.files["/page/x.bin"] = b"<html>too many downloads</html>"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield server
        server.shutdown()


@pytest.fixture
def fetch(mirror: Mirror, tmp_path: Path):
    said: list[str] = []

    def run(*names: str, checksum: str | None = MD5, base: str | None = None) -> Path:
        addresses = tuple(
            n if "://" in n else f"http://127.0.0.1:{mirror.server_port}/{n}/x.bin" for n in names
        )
        file = RemoteFile("x.bin", addresses, checksum)
        record = tmp_path / "fetched.json"
        return fetch_file(file, tmp_path, record, NoProgress(), said.append, base=base)

    run.said = said  # type: ignore[attr-defined]
    return run


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".*.part")]


def test_a_broken_connection_is_continued_where_it_ended(
    fetch, mirror: Mirror, tmp_path: Path
) -> None:
    assert fetch("broken").read_bytes() == CONTENT
    asked = [asked for _, asked in mirror.ranges]
    assert asked == [None, "bytes=100000-", "bytes=200000-"]
    assert left_over(tmp_path) == []


def test_a_killed_fetch_goes_on_in_the_next_call(fetch, mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / ".x.bin.part").write_bytes(CONTENT[:123_456])
    assert fetch("good").read_bytes() == CONTENT
    assert mirror.ranges == [("/good/x.bin", "bytes=123456-")]


def test_a_fetch_that_was_killed_at_its_end_is_complete(fetch, tmp_path: Path) -> None:
    (tmp_path / ".x.bin.part").write_bytes(CONTENT)
    assert fetch("good").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(fetch, tmp_path: Path) -> None:
    (tmp_path / ".x.bin.part").write_bytes(b"something else")
    assert fetch("rude").read_bytes() == CONTENT


@pytest.mark.parametrize("bad", ["other", "page", "missing", AWAY])
def test_the_next_mirror_takes_over(bad: str, fetch, tmp_path: Path) -> None:
    assert fetch(bad, "good").read_bytes() == CONTENT
    assert left_over(tmp_path) == []


def test_all_reasons_are_told_if_every_mirror_fails(fetch, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        fetch("other", "page", "missing", AWAY)
    text = str(told.value)
    assert "its md5 is" in text
    assert "a web page in place of the file" in text
    assert "status 404" in text
    assert "Connection refused" in text
    assert f"Without a network, fetch it elsewhere and put it at {tmp_path / 'x.bin'}" in text
    assert not (tmp_path / "x.bin").exists()


def test_a_file_that_is_there_is_checked_and_not_fetched(
    fetch, mirror: Mirror, tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(CONTENT)
    fetch("good")
    assert mirror.ranges == []
    (tmp_path / "x.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="is damaged or another file"):
        fetch("good")


def test_without_a_published_checksum_the_first_one_is_kept(
    fetch, mirror: Mirror, tmp_path: Path
) -> None:
    seen = hashlib.sha256(CONTENT).hexdigest()
    fetch("good", checksum=None)
    assert seen in fetch.said[-1]
    assert "trusted this once" in fetch.said[-1]
    assert json.loads((tmp_path / "fetched.json").read_text())["x.bin"] == seen
    (tmp_path / "x.bin").unlink()
    with pytest.raises(UserError, match=f"was {seen} when it was first fetched"):
        fetch("other", checksum=None)
    assert fetch("other", "good", checksum=None).read_bytes() == CONTENT


def test_nothing_of_an_archive_lands_outside_of_its_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        entry = tarfile.TarInfo("../outside.txt")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"ha"))
    with pytest.raises(UserError, match="cannot unpack"):
        unpack(tmp_path / "evil.tar", tmp_path / "inner")
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as zipped:
        zipped.writestr("../outside.txt", "ha")
    unpack(tmp_path / "evil.zip", tmp_path / "inner")
    assert not (tmp_path / "outside.txt").exists()


def image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


def test_terra_incognita_is_fetched_and_laid_out(mirror: Mirror, tmp_path: Path, solodg) -> None:
    """Archives as those of LILA, with one image of a location that is not used."""
    places = ["38", "43", "46", "100", "7"]
    described = {
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "car"}],
        "images": [{"id": f"i{p}", "file_name": f"{p}.jpg", "location": p} for p in places],
        "annotations": [{"image_id": f"i{p}", "category_id": 1} for p in places]
        + [{"image_id": "i38", "category_id": 2}],
    }
    images, labels = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=images, mode="w:gz") as archive:
        for place in places:
            entry = tarfile.TarInfo(f"eccv_18_all_images_sm/{place}.jpg")
            entry.size = len(image())
            archive.addfile(entry, io.BytesIO(image()))
    with zipfile.ZipFile(labels, "w") as zipped:
        zipped.writestr("caltech_images_20210113.json", json.dumps(described))
    mirror.files["/m/eccv_18_all_images_sm.tar.gz"] = images.getvalue()
    mirror.files["/m/caltech_camera_traps.json.zip"] = labels.getvalue()
    own = ("--from", f"http://127.0.0.1:{mirror.server_port}/m", "--data-dir", tmp_path)
    code, _, err = solodg("datasets", "get", "terra-incognita", *own)
    assert code == 0, err
    assert "Community Data License Agreement" in err
    root = tmp_path / "terra_incognita"
    found = {str(path.relative_to(root)) for path in root.rglob("*.jpg")}
    assert found == {f"location_{p}/cat/{p}.jpg" for p in places[:4]}
    assert DATASETS["terra-incognita"].find(tmp_path) == str(root)


def test_the_command_says_what_may_not_be_fetched(tmp_path: Path, solodg) -> None:
    code, _, err = solodg("datasets", "get", "pacs", "--data-dir", tmp_path)
    assert code == 2
    assert "https://domaingeneralization.github.io" in err
    assert str(tmp_path / "pacs") in err
    code, _, err = solodg("datasets", "get", "domainnet", "--data-dir", tmp_path)
    assert (code, "--accept-licence" in err) == (2, True)
    code, _, err = solodg("datasets", "get", "packs", "--data-dir", tmp_path)
    assert (code, "Did you mean 'pacs'" in err) == (2, True)
    code, _, err = solodg("datasets", "get", "toy")
    assert (code, "drawn when it is needed" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []
    for domain in DATASETS["pacs"].domains:
        (tmp_path / "PACS" / domain).mkdir(parents=True)
    code, _, err = solodg("datasets", "get", "pacs", "--data-dir", tmp_path)
    assert (code, f"already at {tmp_path / 'PACS'}" in err) == (2, True)


def test_every_recipe_is_of_a_dataset_and_its_files_have_addresses() -> None:
    assert set(RECIPES) <= set(DATASETS)
    for recipe in RECIPES.values():
        for file in (file for files in recipe.files.values() for file in files):
            assert file.mirrors
            assert all(address.endswith("/" + file.name) for address in file.mirrors)
