"""Files that survive crashes."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from solodg.errors import UserError
from solodg.storage import (
    append_line,
    read_json,
    read_lines,
    try_lock,
    write_atomically,
    write_json,
)
from solodg.storage.tensors import read_tensors, write_tensors


def test_a_failed_write_leaves_the_old_content_and_no_rubbish(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_line_cut_off_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b"')
    append_line(path, {"a": 3})
    assert read_lines(path) == [{"a": 1}, {"a": 3}]


def test_tensors_come_back_bit_for_bit_with_their_header(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4).T, "n": torch.tensor(5)}
    write_tensors(tmp_path / "x.safetensors", tensors, {"step": 3, "best": [0.5, None]})
    loaded, header = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[k], v) for k, v in tensors.items())
    assert header == {"step": 3, "best": [0.5, None]}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"{")
    with pytest.raises(UserError, match="x"):
        read_json(tmp_path / "x")
    with pytest.raises(UserError, match="x"):
        read_tensors(tmp_path / "x")


def test_a_lock_file_that_its_holder_removed_is_not_locked_by_one_who_had_opened_it(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock

    def removed_before(file, how) -> None:
        path.unlink()
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", removed_before)
    with try_lock(path, remove=True) as locked:
        assert not locked
    monkeypatch.undo()
    with try_lock(path, remove=True) as locked:
        assert locked
    assert not path.exists()


def test_a_changed_byte_of_a_json_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"classes": ["cat", "dog"], "image_size": 32})
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 64):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(UserError, match=r"x\.json"):
                read_json(path)
    path.write_bytes(whole)
    assert read_json(path) == {"classes": ["cat", "dog"], "image_size": 32}


def test_a_changed_line_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for number in range(5):
        append_line(path, {"accuracy": number})
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"1", b"9", 1)
    lines[3] = b"null\n"
    path.write_bytes(b"".join(lines))
    said: list[str] = []
    assert read_lines(path, said.append) == [{"accuracy": n} for n in (0, 2, 4)]
    assert said == [f"{path}: 2 damaged line(s) of 5 left out."]


def test_files_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}
    with pytest.raises(UserError, match="no checksum"):
        read_json(tmp_path / "x.json", checksum_required=True)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    assert read_lines(tmp_path / "x.jsonl") == [{"a": 1}]
    tensors = {"w": torch.ones(2)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"header": '{"step": 3}'})
    assert read_tensors(tmp_path / "x.safetensors")[1] == {"step": 3}
    with pytest.raises(UserError, match="no checksum"):
        read_tensors(tmp_path / "x.safetensors", checksum_required=True)


@pytest.mark.parametrize(
    "metadata", [None, {"header": "{"}, {"header": "null"}, {"header": "[" * 9999}, {"a": "b"}]
)
def test_tensors_of_others_are_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(UserError, match=r"x\.safetensors"):
        read_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"3", b'"text"', b"[1]", b"{", b"\xff\xfe\x00", b"[" * 99_999,
     b'{"a":' * 200 + b"1" + b"}" * 200, b"9" * 9999],
)  # fmt: skip
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_no_more_is_read_than_a_file_may_hold(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(10**10)  # takes no space on the disk
    with pytest.raises(UserError, match="10,000,000,000 bytes"):
        read_json(tmp_path / "large.json")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="not a regular file"):
            read_json(path)
