"""The frame cache: every video once, whatever is interrupted or broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clips import read_number, set_rotation, steady, write_audio, write_video
from gare.data import frame_cache as cache_module
from gare.data.feature_cache import FeatureCache
from gare.data.frame_cache import CacheSettings, FrameCache, build_frame_cache, pending
from gare.data.manifest import Header, Manifest, Row
from gare.errors import DataError, VideoError
from servers import wait_until

SETTINGS = CacheSettings(num_frames=4, short_side=48)


def make_manifest(folder: Path, num_videos: int = 6) -> Manifest:
    for number in range(num_videos):
        write_video(folder / f"v{number}.mp4", steady(3 + number))
    return manifest_of([f"v{number}.mp4" for number in range(num_videos)], folder)


def manifest_of(names: list[str], folder: Path) -> Manifest:
    rows = tuple(Row(name.partition(".")[0], name, f"caption of {name}", "train") for name in names)
    return Manifest(Header("clips", root=str(folder)), rows)


def build(manifest: Manifest, folder: Path, num_workers: int = 1) -> dict[str, str]:
    entries = build_frame_cache(manifest, folder, SETTINGS, num_workers=num_workers)
    return {entry.video_id: entry.status for entry in entries}


def test_cached_frames_are_those_of_the_videos(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    assert build(manifest, tmp_path / "frames", num_workers=2) == {f"v{n}": "ok" for n in range(6)}
    cache = FrameCache(tmp_path / "frames")
    assert cache.settings == SETTINGS
    assert [read_number(image) for image in cache.read("v0", 4)] == [0, 10, 20]
    assert [read_number(image) for image in cache.read("v5", 4)] == [0, 20, 40, 70]
    assert [read_number(image) for image in cache.read("v5", 2)] == [0, 70]
    assert cache.entries["v5"].times == (0.0, 2.0, 4.0, 7.0)
    with pytest.raises(VideoError, match="never prepared"):
        cache.read("v9", 4)
    shard = tmp_path / "frames/frames-00000.tar"
    with tarfile.open(shard) as archive:  # any tool can read it
        assert "v0/02.jpg" in archive.getnames()
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(VideoError, match=r"is damaged at v0.* prepare again"):
        cache.read("v0", 4)


def test_nothing_is_decoded_twice_unless_it_changed_or_failed(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 2)
    (tmp_path / "v1.mp4").rename(tmp_path / "elsewhere.mp4")
    assert build(manifest, tmp_path / "frames") == {"v0": "ok", "v1": "missing"}
    assert pending(manifest, tmp_path / "frames", SETTINGS) == 1
    (tmp_path / "elsewhere.mp4").rename(tmp_path / "v1.mp4")
    assert build(manifest, tmp_path / "frames") == {"v1": "ok"}
    assert build(manifest, tmp_path / "frames") == {}
    write_video(tmp_path / "v0.mp4", steady(9))
    assert build(manifest, tmp_path / "frames") == {"v0": "ok"}
    assert [read_number(i) for i in FrameCache(tmp_path / "frames").read("v0", 4)] == [0, 20, 50, 80]
    (tmp_path / "v0.mp4").unlink()  # the frames stay good when the video goes
    assert build(manifest, tmp_path / "frames") == {}


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 1)
    build(manifest, tmp_path / "frames")
    with pytest.raises(DataError, match=r"num_frames=4.*num_frames=64.*another folder"):
        list(build_frame_cache(manifest, tmp_path / "frames", CacheSettings(num_frames=64)))
    with pytest.raises(DataError, match="is not a frame cache"):
        FrameCache(tmp_path)


def test_damaged_videos_are_left_out_or_kept_as_asked(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mp4", steady(20), container_options={"movflags": "faststart"})
    (tmp_path / "cut.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    manifest = manifest_of(["cut.mp4"], tmp_path)
    assert [e.has_frames for e in build_frame_cache(manifest, tmp_path / "strict", SETTINGS)] == [False]
    lenient = CacheSettings(num_frames=4, keep_damaged=True)
    (entry,) = build_frame_cache(manifest, tmp_path / "lenient", lenient)
    assert (entry.status, entry.has_frames) == ("truncated", True)


def test_full_shards_are_followed_by_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SHARD_BYTES", 10_000)
    manifest = make_manifest(tmp_path, 6)
    build(manifest_of(["v0.mp4", "v1.mp4", "v2.mp4"], tmp_path), tmp_path / "frames")
    build(manifest, tmp_path / "frames")
    cache = FrameCache(tmp_path / "frames")
    assert len({entry.shard for entry in cache.entries.values()}) > 1
    assert all(read_number(cache.read(f"v{n}", 4)[0]) == 0 for n in range(6))


def test_torn_files_cost_only_what_was_torn(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 3)
    folder = tmp_path / "frames"
    build(manifest, folder)
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])  # killed while writing the last line
    assert build(manifest, folder) == {json.loads(lines[2])["video_id"]: "ok"}
    shard = folder / "frames-00000.tar"
    with shard.open("r+b") as file:  # power lost: the ledger is there, the last frames are not
        file.truncate(shard.stat().st_size - 2000)
    assert len(build(manifest, folder)) == 1
    cache = FrameCache(folder)
    assert all(read_number(cache.read(f"v{n}", 1)[0]) == 0 for n in range(3))


def test_kill_nine_and_resume(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 40)
    manifest.save(tmp_path / "manifest.csv")
    folder = tmp_path / "frames"
    code = f"""
from pathlib import Path
from gare.data.frame_cache import CacheSettings, build_frame_cache
from gare.data.manifest import Manifest
import time
if __name__ == "__main__":
    manifest = Manifest.load(Path({str(tmp_path / "manifest.csv")!r}))
    settings = CacheSettings(num_frames=4, short_side=48)
    for number, _ in enumerate(build_frame_cache(manifest, Path({str(folder)!r}), settings, num_workers=2)):
        if number == 9:
            time.sleep(3600)  # until it is killed
"""
    script = tmp_path / "prepare.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    ledger = folder / "ledger.jsonl"
    wait_until(lambda: ledger.exists() and ledger.read_text().count("\n") >= 5, "the first videos")
    with pytest.raises(DataError, match="another process is preparing"):
        build(manifest, folder)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = set(FrameCache(folder).entries)
    assert 5 <= len(before) < 40
    again = build(manifest, folder)
    assert before.isdisjoint(again)
    assert before | set(again) == {f"v{n}" for n in range(40)}
    cache = FrameCache(folder)
    assert [read_number(cache.read(f"v{n}", 4)[1]) for n in (3, 30)] == [10, 100]
    _wait_until_gone(process.pid)


def _wait_until_gone(session: int) -> None:
    """Workers end with the parent that was killed."""
    wait_until(
        lambda: all(_session_of(stat) != session for stat in Path("/proc").glob("[0-9]*/stat")),
        "workers whose parent is gone to end",
    )


def _session_of(stat: Path) -> int | None:
    try:
        state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        return None if state == "Z" else int(session)
    except (OSError, ValueError):
        return None


def test_a_folder_of_everything(tmp_path: Path) -> None:
    """One of each kind; the bad ones are listed, the good ones show the right moments."""
    good = write_video(tmp_path / "good.mp4", steady(5))
    write_video(tmp_path / "web.webm", steady(5), codec="libvpx-vp9")
    set_rotation(write_video(tmp_path / "rotated.mov", steady(5)))
    write_video(tmp_path / "portrait.mp4", steady(5), size=(96, 160))
    write_video(tmp_path / "variable.mp4", [0, 0.1, 0.2, 3.0, 3.1])
    write_video(tmp_path / "one.mp4", [0.0])
    write_video(tmp_path / "hours.mp4", steady(4 * 3600, fps=1), options={"preset": "ultrafast"})
    (tmp_path / "truncated.mp4").write_bytes(good.read_bytes()[:-900])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello")
    (tmp_path / "concat.mp4").write_text("ffconcat version 1.0\nfile 'good.mp4'\n")
    write_audio(tmp_path / "audio.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    expected = {
        "good.mp4": [0, 10, 20, 40],
        "web.webm": [0, 10, 20, 40],
        "rotated.mov": [0, 10, 20, 40],
        "portrait.mp4": [0, 10, 20, 40],
        "variable.mp4": [0, 2, 3],
        "one.mp4": [0],
        "hours.mp4": [0, 4799, 9599, 14399],
        "truncated.mp4": "truncated",
        "empty.mp4": "zero_length",
        "text.mp4": "unreadable",
        "concat.mp4": "unreadable",
        "audio.mp4": "no_video",
        "pipe.mp4": "unreadable",
        "absent.mp4": "missing",
    }
    statuses = build(manifest_of(list(expected), tmp_path), tmp_path / "frames", num_workers=2)
    cache = FrameCache(tmp_path / "frames")
    for name, wanted in expected.items():
        video_id = name.partition(".")[0]
        if isinstance(wanted, str):
            assert statuses[video_id] == wanted, name
            assert video_id not in cache
            continue
        images = cache.read(video_id, 4)
        if video_id == "rotated":
            images = [image.transpose(Image.Transpose.ROTATE_90) for image in images]
        assert [read_number(image) for image in images] == wanted, name


def test_feature_cache_survives_and_keeps_models_apart(tmp_path: Path) -> None:
    features = {f"v{n}": torch.randn(n + 1, 8, dtype=torch.float16) for n in range(3)}
    cache = FeatureCache(tmp_path, "abc")
    cache.put({"v0": features["v0"]})
    cache.put({"v1": features["v1"], "v2": features["v2"]})
    reopened = FeatureCache(tmp_path, "abc")
    for name, tensor in zip(features, reopened.get(features), strict=True):
        assert torch.equal(tensor, features[name])
    assert reopened.missing(["v1", "v7"]) == ["v7"]
    assert FeatureCache(tmp_path, "def").missing(["v1"]) == ["v1"]
    with pytest.raises(DataError, match="1 features are not in"):
        reopened.get(["v7"])
    next((tmp_path / "abc").glob("*.safetensors")).write_bytes(b"broken")
    with pytest.raises(DataError, match="is damaged"):
        FeatureCache(tmp_path, "abc")
    with pytest.raises(ValueError, match="is not a fingerprint"):
        FeatureCache(tmp_path, "a/b")


def test_jpeg_keeps_the_picture(tmp_path: Path, shared: Path) -> None:
    from gare.data.video import read_frames

    (source,) = (shared / "data/clips").glob("video9880.mp4")
    manifest = manifest_of(["video9880.mp4"], source.parent)
    list(build_frame_cache(manifest, tmp_path, CacheSettings(num_frames=3, short_side=224)))
    cached = FrameCache(tmp_path).read("video9880", 3)
    for kept, original in zip(cached, read_frames(source, 3, short_side=224), strict=True):
        difference = np.asarray(kept).astype(float) - np.asarray(original)
        assert np.sqrt((difference**2).mean()) < 5
