"""A file is the old one or the new one, and a failure leaves nothing behind."""

from __future__ import annotations

import pytest

from gare.atomic import replacing, write_bytes, write_text


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
