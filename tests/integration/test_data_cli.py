"""`gare data prepare` and `gare data check`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from clips import steady, write_audio, write_video
from gare.cli.data_command import app
from gare.data.loader import FrameSource, PairLoader
from gare.errors import DataError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    """Ten videos, two of them bad, one a copy of another."""
    for number in range(7):
        write_video(tmp_path / f"clip{number}.mp4", steady(2 + number))
    (tmp_path / "copy.mp4").write_bytes((tmp_path / "clip0.mp4").read_bytes())
    write_audio(tmp_path / "song.mp4")
    names = [*(f"clip{number}" for number in range(7)), "copy", "song", "absent"]
    lines = [f"{name}.mp4,a thing called {name}" for name in names]
    path = tmp_path / "captions.csv"
    path.write_text("video,caption\n" + "\n".join(lines) + "\nclip1.mp4,a thing called clip0\n")
    return path


def test_from_csv_to_batches(captions: Path) -> None:
    out = captions.parent / "prepared"
    result = run("prepare", "csv", "--annotations", captions, "--out", out, "--frames", 4, "--workers", 2)
    assert result.exit_code == 0, result.output
    assert "train  10 videos, 11 captions" in result.stdout
    assert "8 of 10 videos have frames" in result.stdout
    assert "no_video song.mp4" in result.stderr
    assert "missing absent.mp4" in result.stderr
    assert "2 videos are not as they should be" in result.stderr
    with pytest.raises(DataError, match="2 of 10 videos have no frames"):
        FrameSource.open(out, 4)
    source = FrameSource.open(out, 4, allow_missing=True)
    text, video = next(PairLoader(source, "train", image_size=32, batch_size=8, seed=0).batches(0))
    assert len(text) == len(video) == 8


def test_prepare_again_only_tries_what_failed(captions: Path) -> None:
    out = captions.parent / "prepared"
    arguments = (
        "prepare",
        "csv",
        "--annotations",
        captions,
        "--out",
        out,
        "--frames",
        4,
        "--workers",
        1,
        "--json",
    )
    first = json.loads(run(*arguments).stdout)
    assert {failure["kind"] for failure in first["failures"]} == {"no_video", "missing"}
    write_video(captions.parent / "absent.mp4", steady(2))
    second = json.loads(run(*arguments).stdout)
    assert [failure["video_id"] for failure in second["failures"]] == ["song.mp4"]
    assert second["num_with_frames"] == 9


def test_check_reports_and_fails(captions: Path) -> None:
    out = captions.parent / "prepared"
    run("prepare", "csv", "--annotations", captions, "--out", out, "--workers", 1)
    result = run("check", out, "--workers", 2)
    assert result.exit_code == 1
    assert "8 videos are readable" in result.stdout
    assert "clip0.mp4 = copy.mp4: the same content" in result.stdout
    assert "'a thing called clip0' describes 2 videos" in result.stdout
    report = json.loads(run("check", out / "manifest.csv", "--workers", 1, "--json").stdout)
    kinds = {finding["kind"] for finding in report["findings"]}
    assert kinds == {"missing", "no_video", "duplicate_video", "duplicate_caption"}
    quick = json.loads(run("check", out, "--no-decode", "--workers", 1, "--json").stdout)
    assert "no_video" not in {finding["kind"] for finding in quick["findings"]}
    assert "missing" in {finding["kind"] for finding in quick["findings"]}


def test_check_notices_lost_rows(captions: Path) -> None:
    out = captions.parent / "prepared"
    run("prepare", "csv", "--annotations", captions, "--out", out, "--workers", 1)
    path = out / "manifest.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-3]) + "\n")
    report = json.loads(run("check", out, "--no-decode", "--workers", 1, "--json").stdout)
    assert "train: 8 videos, 8 captions instead of 10 videos, 11 captions" in str(report["findings"])


def test_a_good_set_passes(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", steady(2))
    (tmp_path / "captions.csv").write_text("video,caption\na.mp4,a dog\n")
    run(
        "prepare",
        "csv",
        "--annotations",
        tmp_path / "captions.csv",
        "--out",
        tmp_path / "out",
        "--workers",
        1,
    )
    result = run("check", tmp_path / "out", "--workers", 1)
    assert (result.exit_code, "nothing to mend" in result.stdout) == (0, True)


def test_images_need_no_cache(shared: Path, tmp_path: Path) -> None:
    result = run(
        "prepare",
        "msrvtt-frames",
        *("--annotations", shared / "annotations/msrvtt"),
        *("--videos", shared / "data/msrvtt_frames", "--out", tmp_path),
    )
    assert result.exit_code == 0, result.output
    assert "test   476 videos, 476 captions" in result.stdout
    assert "no frame cache is needed" in result.stderr
    source = FrameSource.open(tmp_path, 12)
    assert len(source.read(source.manifest.videos("test")[0])) > 0


def test_images_that_are_not_there_are_listed(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "captions.csv").write_text("video,caption\na.png,a dog\nb.png,a cat\n")
    result = run("prepare", "csv", "--annotations", tmp_path / "captions.csv", "--out", tmp_path / "out")
    assert "1 of 2 videos have frames" in result.stdout
    assert "1 missing" in result.stderr


def test_a_cache_is_not_taken_for_another(captions: Path) -> None:
    out = captions.parent / "prepared"
    run("prepare", "csv", "--annotations", captions, "--out", out, "--frames", 4, "--workers", 1)
    with pytest.raises(DataError, match=r"holds 4 frames a video.*Prepare with --frames 12"):
        FrameSource.open(out, 12, allow_missing=True)
    with pytest.raises(DataError, match="--sampling uniform"):
        FrameSource.open(out, 4, "uniform", allow_missing=True)


def test_parquet_and_hold_out(captions: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is an extra")
    out = captions.parent / "prepared"
    arguments = (
        "--annotations",
        captions,
        "--out",
        out,
        "--workers",
        1,
        "--table",
        "parquet",
        "--hold-out",
        3,
    )
    out.mkdir()
    (out / "manifest.csv").write_text("left over from before")
    result = run("prepare", "csv", *arguments)
    assert "val    3 videos" in result.stdout
    assert FrameSource.open(out, 4, allow_missing=True).manifest.splits == ["train", "val"]


def test_misuse_and_failure_are_told_apart(tmp_path: Path) -> None:
    wrong = run("prepare", "msrvt", "--annotations", tmp_path, "--out", tmp_path / "out")
    assert wrong.exit_code == 2
    assert "msrvtt-9k" in wrong.stderr
    failed = run("prepare", "msvd", "--annotations", tmp_path, "--out", tmp_path / "out")
    assert isinstance(failed.exception, DataError)
    (tmp_path / "captions.csv").write_text("video,caption\na.mp4,a dog\n")
    nowhere = ["--videos", tmp_path / "none", "--out", tmp_path / "out"]
    failed = run("prepare", "csv", "--annotations", tmp_path / "captions.csv", *nowhere)
    assert "none is not a folder; give the folder that holds the videos" in str(failed.exception)
    assert not (tmp_path / "out").exists()
    nothing = run("prepare", "csv", "--annotations", tmp_path / "captions.csv", "--out", tmp_path / "o")
    assert "not one of 1 videos could be read" in str(nothing.exception)


def test_help_has_examples() -> None:
    for command in ("prepare", "check"):
        assert f"gare data {command}" in run(command, "--help").stdout
