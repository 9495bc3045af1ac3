"""Real files of many kinds: the right moments of the good ones, one typed error for each bad one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from clips import numbered_image, read_number, set_rotation, steady, write_audio, write_film, write_video
from gare.data.video import VideoReader, read_clip, read_frames
from gare.errors import VideoError


def numbers(images: list[Image.Image]) -> list[int]:
    return [read_number(image) for image in images]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("clip.mp4", "libx264"),
        ("clip.mov", "libx264"),
        ("clip.webm", "libvpx-vp9"),
        ("clip.mkv", "libx264"),
        ("clip.avi", "mpeg4"),
        ("clip.ts", "libx264"),
        ("clip.flv", "libx264"),
        ("a:b.mp4", "libx264"),
    ],
)
def test_grid_takes_the_frame_of_every_second(tmp_path: Path, name: str, codec: str) -> None:
    path = write_video(tmp_path / name, steady(5.5), codec=codec)
    assert numbers(read_frames(path, 12))[:6] == [0, 10, 20, 30, 40, 50]
    assert numbers(read_frames(path, 3))[0] == 0


def test_long_videos_are_thinned_evenly(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", steady(30), keyframe_every=250)
    assert numbers(read_frames(path, 4)) == [0, 90, 190, 290]
    clip = read_clip(path, 4, "uniform")
    assert numbers(clip.images) == [37, 112, 187, 262]
    assert clip.times == pytest.approx([3.7, 11.2, 18.7, 26.2])


def test_variable_frame_rate_follows_the_clock(tmp_path: Path) -> None:
    path = write_video(tmp_path / "vfr.mp4", [0, 0.1, 0.2, 3.0, 3.1, 7.0, 7.05, 7.5])
    clip = read_clip(path, 12)
    assert numbers(clip.images) == [0, 2, 3, 4, 5]  # seconds 0, 1 and 2, 3, 4 to 6, 7
    assert clip.times == pytest.approx([0, 0.2, 3.0, 3.1, 7.0])


def test_where_few_frames_are_wanted_those_that_no_other_needs_are_left_out(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", 500, sound="", options={"bf": "3"})
    seen = {}
    for step in (0.0, 0.5):
        with VideoReader(film) as reader:
            reader.thin_out(step)
            shown = [reader.image_at(second / 2) for second in range(40)]
            seen[step] = [(time, read_number(image)) for time, image in shown]
    assert all(time == pytest.approx(number / 25) for times in seen.values() for time, number in times)
    assert [number for _, number in seen[0.0]] == [25 * second // 2 for second in range(40)]
    late = [second / 2 - time for second, (time, _) in enumerate(seen[0.5])]
    assert 0 < max(late) <= 4 / 25


def test_a_video_of_few_frames_keeps_them_all(tmp_path: Path) -> None:
    slow = write_video(tmp_path / "slow.mp4", steady(20), options={"bf": "3"})
    with VideoReader(slow) as reader:
        reader.thin_out(0.5)
        assert numbers([reader.image_at(second / 2)[1] for second in range(40)]) == list(range(0, 200, 5))


def test_a_glance_sees_the_frame_on_screen(tmp_path: Path) -> None:
    with VideoReader(write_video(tmp_path / "clip.mp4", steady(3), size=(640, 480))) as reader:
        time, image = reader.glance_at(1.25, 48)
        assert (time, image.size, read_number(image)) == (pytest.approx(1.2), (64, 48), 12)


def test_start_and_end_cut_a_part(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", steady(20))
    assert numbers(read_frames(path, 12, start=5.0, end=8.0)) == [50, 60, 70]
    with pytest.raises(VideoError, match=r"nothing from 30.0 s to the end: it lasts 20.00 s") as error:
        read_frames(path, 12, start=30.0)
    assert error.value.kind == "zero_length"


def test_rotation_is_applied(tmp_path: Path) -> None:
    path = set_rotation(write_video(tmp_path / "phone.mov", steady(3)))
    images = read_frames(path, 12)
    assert images[0].size == (48, 64)
    # Turned clockwise, the left edge is on top; turning back gives the numbers.
    upright = [image.transpose(Image.Transpose.ROTATE_90) for image in images]
    assert numbers(upright) == [0, 10, 20]


def test_portrait_and_short_side(tmp_path: Path) -> None:
    path = write_video(tmp_path / "portrait.mp4", steady(2), size=(96, 160))
    assert read_frames(path, 2)[0].size == (96, 160)
    small = read_frames(path, 2, short_side=48)
    assert small[0].size == (48, 80)
    assert numbers(small) == [0, 10]
    assert read_frames(path, 2, short_side=500)[0].size == (96, 160)  # never enlarged


def test_one_frame_gives_one_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "one.mp4", [0.0])
    assert len(read_frames(path, 12)) == len(read_frames(path, 12, "uniform")) == 1


def test_files_that_do_not_state_their_duration(tmp_path: Path) -> None:
    live = write_video(tmp_path / "live.webm", steady(4), codec="libvpx-vp9", container_options={"live": "1"})
    raw = write_video(tmp_path / "raw.h264", steady(4))
    assert numbers(read_frames(live, 12)) == [0, 10, 20, 30]
    assert numbers(read_frames(raw, 12)) == [0, 25]  # a raw stream has no clock; 25 a second is assumed


def damaged(path: Path, kind: str, folder: Path) -> Path:
    """One bad file of each kind, made from a good one."""
    content = path.read_bytes()
    bad = folder / f"{kind}{path.suffix}"
    if kind == "cut":
        bad.write_bytes(content[: len(content) * 2 // 3])
    elif kind == "scrambled":
        middle = len(content) // 2
        noise = bytes((7 * number * number) % 256 for number in range(400))
        bad.write_bytes(content[:middle] + noise + content[middle + 400 :])
    return bad


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("index_last.mp4", "libx264", {}),
        ("index_first.mp4", "libx264", {"movflags": "faststart"}),
        ("clip.webm", "libvpx-vp9", {}),
        ("clip.avi", "mpeg4", {}),
    ],
)
def test_truncated_files_are_told_from_whole_ones(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    good = write_video(tmp_path / name, steady(20), codec=codec, container_options=options)
    assert len(read_frames(good, 12)) == 12
    with pytest.raises(VideoError, match=r"truncated.*copy or download it again") as error:
        read_frames(damaged(good, "cut", tmp_path), 12)
    assert error.value.kind == "truncated"


def test_a_truncated_file_still_gives_what_it_has(tmp_path: Path) -> None:
    good = write_video(tmp_path / "a.mp4", steady(20), container_options={"movflags": "faststart"})
    clip = read_clip(damaged(good, "cut", tmp_path), 12)
    assert clip.damage is not None
    assert numbers(clip.images)[:4] == [0, 10, 30, 50]


def test_damage_in_mid_stream_is_one_report(tmp_path: Path) -> None:
    good = write_video(tmp_path / "a.mp4", steady(30), container_options={"movflags": "faststart"})
    bad = damaged(good, "scrambled", tmp_path)
    with pytest.raises(VideoError) as error:
        read_frames(bad, 64)
    assert error.value.kind == "corrupt"
    clip = read_clip(bad, 64)
    assert numbers(clip.images)[:3] == [0, 10, 20]
    assert numbers(clip.images)[-1] == 290


@pytest.mark.parametrize(("name", "coding"), [("a.mp4", b"avc1"), ("a.mkv", b"V_MPEG4/ISO/AVC")])
def test_a_coding_that_nobody_knows(tmp_path: Path, name: str, coding: bytes) -> None:
    """One damaged byte in its name is enough: then there is a stream, and no decoder for it."""
    path = write_video(tmp_path / name, steady(2))
    path.write_bytes(path.read_bytes().replace(coding, coding[:-1] + b"~"))
    with pytest.raises(VideoError, match="its coding is unknown") as error:
        read_clip(path, 12)
    assert error.value.kind == "unreadable"


def test_a_damaged_header_that_asks_for_more_memory_than_there_can_be(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", steady(8))
    content = bytearray(path.read_bytes())
    content[content.index(b"avc1", content.index(b"stsd")) - 1] = 255  # how long what describes the stream is
    path.write_bytes(content)
    with pytest.raises(VideoError, match="Cannot allocate memory") as error:
        read_clip(path, 12)
    assert error.value.kind == "unreadable"


def test_audio_only(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="only audio") as error:
        read_frames(write_audio(tmp_path / "song.mp4"), 12)
    assert error.value.kind == "no_video"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "zero_length"),
        (b"hello, this is text\n" * 50, "unreadable"),
        (b"ffconcat version 1.0\nfile 'secret.mp4'\n", "unreadable"),
        (b"#EXTM3U\n#EXTINF:10,\nsecret.ts\n#EXT-X-ENDLIST\n", "unreadable"),
    ],
    ids=["empty", "text", "concat list", "playlist"],
)
def test_files_that_are_no_videos(tmp_path: Path, content: bytes, kind: str) -> None:
    write_video(tmp_path / "secret.mp4", steady(2))
    write_video(tmp_path / "secret.ts", steady(2))
    path = tmp_path / "renamed.mp4"
    path.write_bytes(content)
    with pytest.raises(VideoError) as error:
        read_frames(path, 12)
    assert error.value.kind == kind


def test_missing_file() -> None:
    with pytest.raises(VideoError, match=r"does not exist") as error:
        read_frames("no/such/clip.mp4", 12)
    assert error.value.kind == "missing"


def test_four_hours_take_no_more_memory_than_four_seconds(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "long.mp4",
        steady(4 * 3600, fps=1),
        keyframe_every=250,
        options={"preset": "ultrafast"},
    )
    read_frames(path, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images = read_frames(path, 64)
    assert numbers(images) == [int(14399 * step / 63) for step in range(64)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kilobytes


def test_frames_sources_work_like_videos(tmp_path: Path) -> None:
    folder = tmp_path / "video7"
    folder.mkdir()
    for number in range(12):
        numbered_image(number).save(folder / f"frame{number}.png")  # frame2 comes before frame10
    with tarfile.open(tmp_path / "videos.tar", "w") as archive:
        archive.add(folder, "video7")
        archive.add(folder / "frame3.png", "single.png")
    for source in (folder, f"{tmp_path}/videos.tar::video7/", f"{tmp_path}/videos.tar::video7"):
        assert numbers(read_frames(source, 4)) == [0, 3, 7, 11]
        assert numbers(read_frames(source, 64)) == list(range(12))
    assert numbers(read_frames(f"{tmp_path}/videos.tar::single.png", 4)) == [3]
    assert numbers(read_frames(folder / "frame5.png", 4)) == [5]


def test_photos_are_turned_as_their_camera_was(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to display
    numbered_image(1234).save(tmp_path / "photo.jpg", exif=exif, quality=95)
    (image,) = read_frames(tmp_path / "photo.jpg", 4)
    assert image.size == (48, 64)
    assert read_number(image.transpose(Image.Transpose.ROTATE_90)) == 1234


def test_frames_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("not an image")
    numbered_image(3, (640, 480)).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-500])
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "whole.jpg", "whole.jpg")
    (tmp_path / "bad.tar").write_bytes(b"x" * 2000)
    cases = {
        "empty": "zero_length",
        "zero.png": "zero_length",
        "text.png": "unreadable",
        "cut.jpg": "truncated",
        "none.png": "missing",
        "a.tar::video9/": "missing",
        "none.tar::video9/": "missing",
        "bad.tar::video9/": "unreadable",
    }
    for name, kind in cases.items():
        with pytest.raises(VideoError) as error:
            read_frames(f"{tmp_path}/{name}", 4)
        assert error.value.kind == kind, name
    with pytest.raises(VideoError, match="without timestamps"):
        read_frames(tmp_path / "whole.jpg", 4, start=1.0)


def test_every_shared_clip_is_read(shared: Path) -> None:
    paths = [path for path in sorted((shared / "data/clips").iterdir()) if path.suffix != ".csv"]
    assert len(paths) == 22  # one has metadata that is not UTF-8
    for path in paths:
        clip = read_clip(path, 12, short_side=64)
        assert clip.damage is None, path
        assert clip.images
        assert clip.times == sorted(clip.times)


def test_the_package_imports_without_pyav(tmp_path: Path) -> None:
    numbered_image(5).save(tmp_path / "a.png")
    (tmp_path / "a.mp4").write_bytes(b"something")
    code = f"""
import sys
sys.modules["av"] = None
from gare.data.video import read_frames
from gare.errors import GareError
assert len(read_frames({str(tmp_path / "a.png")!r}, 2)) == 1
try:
    read_frames({str(tmp_path / "a.mp4")!r}, 2)
except GareError as error:
    assert "pip install av" in str(error)
else:
    raise SystemExit("expected an error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
