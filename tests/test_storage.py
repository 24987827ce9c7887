"""Files that survive crashes."""

import os
from pathlib import Path

import pytest
import torch

from solodg.errors import UserError
from solodg.storage import (
    append_line,
    read_json,
    read_lines,
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
