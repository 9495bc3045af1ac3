"""A file is the old one or the new one, and a failure leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gare import atomic
from gare.atomic import creating, replacing, write_bytes, write_text


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "results.json"
    write_text(target, "old")

    def write_half() -> None:
        with replacing(target) as part:
            part.write_text("half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "data.bin"
    write_bytes(target, b"old")
    with replacing(target) as part:
        part.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"


def _write_both(part: Path, other: Path) -> None:
    part.write_bytes(b"second")
    other.write_bytes(b"came meanwhile")


@pytest.mark.parametrize("missing", [(), ("renameat2",), ("renameat2", "link")])
def test_a_new_file_replaces_nothing(tmp_path, monkeypatch, missing):
    """Whatever the file system can do: rename without replacing, link, or neither."""

    def refuse(*_: object) -> None:
        raise PermissionError

    if "renameat2" in missing:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    if "link" in missing:
        monkeypatch.setattr(atomic.os, "link", refuse)
    target = tmp_path / "clip.mp4"
    with creating(target) as part:
        part.write_bytes(b"first")
        assert not target.exists()
    assert target.read_bytes() == b"first"
    with pytest.raises(FileExistsError), creating(target):
        pass
    other = tmp_path / "other.mp4"
    with pytest.raises(FileExistsError), creating(other) as part:
        _write_both(part, other)
    assert other.read_bytes() == b"came meanwhile"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "other.mp4"]
