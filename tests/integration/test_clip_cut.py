"""Moments cut out of real files, read back frame by frame and sample by sample."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from clips import SAMPLE_RATE, read_number, set_rotation, steady, write_film, write_video
from gare.data.boxed_cut import _CutJob, _CutTask, container_for, cut_clip, read_media_facts
from gare.data.decoder_messages import Cut, Media, Picture, ProtocolError
from gare.data.video import VideoReader
from gare.data.video_cut import CutOrder
from gare.data.workers import Limits
from gare.errors import ClipError
from gare.library.editing.clip_files import clip_name, cut_moment
from gare.library.editing.moments import Moment
from servers import HANG_S

START, END = 2.5, 3.9
FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)
UNEVEN = list(np.cumsum([0.0, *[0.02, 0.04, 0.08, 0.06] * 50]))
B_FRAMES = {"bf": "2", "b_strategy": "0"}
FILMS = {
    "b-frames.mp4": {"options": B_FRAMES},
    "mpeg4.avi": {"codec": "mpeg4", "sound": "libmp3lame", "options": {"bf": "0"}},
    "23.976.mkv": {"rate": FILM},
    "29.97.mov": {"rate": NTSC, "options": B_FRAMES},
    "variable.mp4": {"times": UNEVEN},
    "surround.ts": {"layout": "5.1"},
    "vp9.webm": {"codec": "libvpx-vp9", "sound": "libopus", "options": {"deadline": "realtime"}},
}
DELAY_S = 0.06  # of sound: encoders put a little silence before it, which not every container tells


@pytest.fixture(scope="module", params=FILMS)
def film(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = FILMS[request.param]
    num_frames = len(UNEVEN) if "times" in settings else 150
    return write_film(tmp_path_factory.mktemp("film") / request.param, num_frames, **settings)


def frames_of(path: Path) -> list[tuple[float, int]]:
    """Time and number of every frame, from the first frame on."""
    with av.open(str(path)) as container:
        found = [(float(frame.time), read_number(frame.to_image())) for frame in container.decode(video=0)]
    return [(time - found[0][0], number) for time, number in found]


def sound_of(path: Path) -> tuple[float, np.ndarray]:
    """When sound begins, and its samples."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler(format="fltp", rate=SAMPLE_RATE)
        frames = list(container.decode(audio=0))
        parts = [made.to_ndarray() for frame in frames for made in resampler.resample(frame)]
        return float(frames[0].time), np.concatenate(parts, axis=1)


def tones(path: Path) -> list[float]:
    """When tones begin, in seconds from the first frame of the picture."""
    with av.open(str(path)) as container:
        picture = container.streams.video[0]
        origin = float((picture.start_time or 0) * picture.time_base)
    start, samples = sound_of(path)
    loud = np.flatnonzero(np.abs(samples[0]) > 0.1)
    begins = loud[np.flatnonzero(np.diff(loud, prepend=-SAMPLE_RATE) > SAMPLE_RATE // 2)]
    return [start - origin + begin / SAMPLE_RATE for begin in begins]


def same_tones(source: Path, clip: Path, start: float, end: float) -> None:
    """Every tone that begins well within the part is in the clip, at the same picture."""
    expected = [time - start for time in tones(source) if start + 0.1 < time < end - 0.15]
    found = np.array(tones(clip))
    assert expected
    assert [found[np.abs(found - time).argmin()] for time in expected] == pytest.approx(expected, abs=DELAY_S)


def channels(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(stream.codec_context.layout.nb_channels for stream in container.streams.audio)


def test_a_copy_begins_at_the_keyframe_before_and_loses_nothing(film, tmp_path):
    clip = cut_clip(film, tmp_path / f"clip{container_for(film.name, exact=False)}", START, END)
    source, made = frames_of(film), frames_of(clip.path)
    first = made[0][1]
    on_screen = max(number for time, number in source if time <= START + 1e-6)
    assert first % 24 == 0
    assert first == on_screen // 24 * 24
    assert clip.start == pytest.approx(source[first][0], abs=0.002)
    last = max(number for time, number in source if time < END - 1e-6)
    numbers = [number for _, number in made]
    assert numbers[: last - first + 1] == list(range(first, last + 1))
    assert numbers[-1] <= last + 4  # a frame that others lean on may follow
    assert len(made) == clip.num_frames
    assert [time + clip.start for time, _ in made] == pytest.approx(
        [source[number][0] for number in numbers], abs=0.003
    )
    assert clip.end == pytest.approx(source[numbers[-1]][0], abs=0.15)
    assert channels(clip.path) == channels(film)
    same_tones(film, clip.path, clip.start, END)
    with av.open(str(film)) as whole, av.open(str(clip.path)) as part:
        pixels = [frame.to_ndarray() for frame in whole.decode(video=0)]
        for frame, number in zip(part.decode(video=0), numbers, strict=True):
            np.testing.assert_array_equal(frame.to_ndarray(), pixels[number])


def test_an_exact_clip_has_the_frames_that_were_asked_for(film, tmp_path):
    clip = cut_clip(film, tmp_path / f"clip{container_for(film.name, exact=True)}", START, END, exact=True)
    source, made = frames_of(film), frames_of(clip.path)
    first = max(number for time, number in source if time <= START + 1e-6)
    last = max(number for time, number in source if time < END - 1e-6)
    assert [number for _, number in made] == list(range(first, last + 1))
    assert len(made) == clip.num_frames
    assert clip.start == pytest.approx(source[first][0], abs=0.002)
    assert clip.end == pytest.approx(source[last + 1][0], abs=0.002)
    expected = [source[number][0] - source[first][0] for number in range(first, last + 1)]
    assert [time for time, _ in made] == pytest.approx(expected, abs=0.003)
    assert channels(clip.path) == channels(film)
    same_tones(film, clip.path, clip.start, END)
    _, samples = sound_of(clip.path)
    assert samples.shape[1] / SAMPLE_RATE == pytest.approx(clip.end - clip.start, abs=DELAY_S)


@pytest.mark.parametrize(("name", "rate"), [("23.976.mkv", FILM), ("29.97.mov", NTSC)])
@pytest.mark.parametrize("exact", [False, True])
def test_rates_of_film_and_ntsc_are_kept(tmp_path, name, rate, exact):
    film = write_film(tmp_path / name, 100, rate=rate)
    clip = cut_clip(film, tmp_path / f"clip{film.suffix}", 1.0, 3.0, exact=exact)
    facts = read_media_facts([str(clip.path)])[str(clip.path)]
    assert isinstance(facts, Media)
    assert Fraction(*facts.rate) == rate
    assert not facts.is_variable


def test_facts_for_editors(tmp_path):
    films = {
        "a.mov": {"rate": NTSC, "timecode": "01:00:00;00"},
        "b.mp4": {"times": UNEVEN, "layout": "5.1"},
        "c.mp4": {"sound": "", "options": B_FRAMES},
        "d.mkv": {"rate": FILM},
    }
    paths = [
        str(write_film(tmp_path / name, 201 if "times" in settings else 60, **settings))
        for name, settings in films.items()
    ]
    ntsc, variable, silent, film = read_media_facts(paths).values()
    assert Fraction(*ntsc.rate) == NTSC
    assert (ntsc.first_frame, ntsc.is_drop_frame) == (107892, True)
    assert (ntsc.num_channels, ntsc.num_audio, ntsc.sample_rate) == (2, 1, SAMPLE_RATE)
    assert variable.is_variable
    assert variable.num_channels == 6
    assert (silent.num_channels, silent.is_variable, silent.rate) == (0, False, (25, 1))
    assert Fraction(*film.rate) == FILM
    assert film.duration == pytest.approx(60 / float(FILM), abs=0.05)
    problem = read_media_facts([str(tmp_path / "none.mp4")])[str(tmp_path / "none.mp4")]
    assert isinstance(problem, ClipError)


@pytest.mark.parametrize("exact", [False, True])
def test_a_film_of_a_phone_stays_upright(tmp_path, exact):
    film = set_rotation(write_video(tmp_path / "phone.mp4", steady(3), size=(128, 48)))
    clip = cut_clip(film, tmp_path / "clip.mp4", 1.5, 2.5, exact=exact)
    with VideoReader(film) as source, VideoReader(clip.path) as made:
        assert made.size == source.size == (48, 128)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_film(tmp_path_factory.mktemp("short") / "short.mp4", 100)


def test_nothing_is_overwritten(short, tmp_path):
    taken = tmp_path / "taken.mp4"
    taken.write_bytes(b"mine")
    with pytest.raises(ClipError, match="nothing is overwritten"):
        cut_clip(short, taken, 0, 1)
    assert taken.read_bytes() == b"mine"
    outside = tmp_path / "elsewhere" / "file.mp4"
    (tmp_path / "link.mp4").symlink_to(outside)
    with pytest.raises(ClipError, match="nothing is overwritten"):
        cut_clip(short, tmp_path / "link.mp4", 0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.mp4", "taken.mp4"]


def test_a_name_that_came_to_be_meanwhile_is_not_overwritten(short, tmp_path):
    target = tmp_path / "clip.mp4"
    with pytest.raises(ClipError, match="nothing is overwritten"):
        cut_clip(short, target, 0, 3, on_cut=lambda share: target.write_bytes(b"mine"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]


def test_in_a_folder_a_taken_name_gets_a_number(short, tmp_path):
    moment = Moment(str(short), 0.0, 1.0)
    names = [cut_moment(moment, tmp_path / "new" / "folder").path.name for _ in range(3)]
    stem = "short_0-00-00.000_0-00-01.000"
    assert names == [f"{stem}.mp4", f"{stem}-2.mp4", f"{stem}-3.mp4"]


@pytest.mark.parametrize(
    "name",
    ["..", "...", ".hidden.mp4", "-rf.mp4", "a\nb.mp4", "x\u202egpm.mp4", "é" * 120 + ".mp4", "CON.mp4",
     "\\..\\x.mp4", "$(rm -r ~);.mp4", "\x1b[31m.mp4", "a:b.mp4"],
)  # fmt: skip
def test_a_name_of_a_stranger_leads_nowhere_else(tmp_path, name):
    made = clip_name(Moment(f"/videos/{name}", 1.0, 2.0), ".mp4")
    assert os.path.basename(made) == made
    assert made[0] not in ".-"
    assert len(made.encode()) < 200
    assert not set(made) & set("\n\x1b\u202e\\/:$;~")
    assert (tmp_path / made).resolve().parent == tmp_path.resolve()


def test_a_cut_that_is_stopped_leaves_nothing(short, tmp_path):
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_clip(short, tmp_path / "clip.mp4", 0, 3, exact=True, on_cut=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_cut_that_is_killed_leaves_no_clip(short, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from gare.data.boxed_cut import cut_clip\n"
        "kill = lambda share: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cut_clip(sys.argv[1], Path(sys.argv[2]), 0, 3, exact=True, on_cut=kill)"
    )
    command = [sys.executable, "-c", code, str(short), str(tmp_path / "clip.mp4")]
    assert subprocess.run(command, timeout=HANG_S, check=False).returncode == -9
    assert {path.suffix for path in tmp_path.iterdir()} <= {".part"}
    assert cut_clip(short, tmp_path / "clip.mp4", 0, 3).num_frames >= 75


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (3, 2, "later end"),
        (-1, 2, "later end"),
        (float("nan"), 2, "later end"),
        (0, 1e9, "24 hours"),
        (60, 61, "no picture"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_part_that_is_not_there(short, tmp_path, start, end, message, exact):
    with pytest.raises(ClipError, match=message):
        cut_clip(short, tmp_path / "clip.mp4", start, end, exact=exact)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_cut(short, tmp_path):
    cut = short.read_bytes()[:4000]
    for name, content in {"text.mp4": b"this is no video", "half.mp4": cut, "empty.mp4": b""}.items():
        (tmp_path / name).write_bytes(content)
    sounds = tmp_path / "out"
    sounds.mkdir()
    for name in ("text.mp4", "half.mp4", "empty.mp4", "none.mp4", "."):
        for exact in (False, True):
            with pytest.raises(ClipError):
                cut_clip(tmp_path / name, sounds / "clip.mp4", 0, 1, exact=exact)
    for name in ("text.mp4", "empty.mp4"):
        with pytest.raises(ClipError, match="is not a video that can be read: Invalid data") as refused:
            cut_clip(tmp_path / name, sounds / "clip.mp4", 0, 1)
        assert "--exact" not in str(refused.value)  # which would not help
    with pytest.raises(ClipError, match=r"none\.mp4 cannot be read: No such file"):
        cut_clip(tmp_path / "none.mp4", sounds / "clip.mp4", 0, 1)
    with pytest.raises(
        ClipError, match=rf"^{sounds / ('x' * 300)}\.mp4 cannot be written: File name too long"
    ):
        cut_clip(short, sounds / f"{'x' * 300}.mp4", 0, 1)
    with pytest.raises(ClipError, match="no folder"):
        cut_clip(short, tmp_path / "nowhere" / "clip.mp4", 0, 1)
    with pytest.raises(ClipError, match="no name for a clip"):
        cut_clip(short, sounds / "clip.exe", 0, 1)
    with pytest.raises(ClipError, match="--exact encodes it anew"):
        cut_clip(short, sounds / "clip.webm", 0, 1)
    assert list(sounds.iterdir()) == []


def test_a_clip_has_a_largest_size(short, tmp_path):
    with pytest.raises(ClipError, match="larger") as refused:
        cut_clip(short, tmp_path / "clip.mp4", 0, 3, limits=Limits(written_bytes=2000))
    assert refused.value.kind == "too_large"
    assert list(tmp_path.iterdir()) == []


def test_a_decoder_that_was_taken_over_cannot_say_more_than_it_may(short):
    with short.open("rb") as file:
        job = _CutJob(CutOrder("x", 1.0, 2.0, False, "mp4"), file.fileno(), file.fileno())
        for lie in (Picture(0.0, b""), Cut(2.0, 1.0, 1, False), Cut(5.0, 6.0, 1, True)):
            with pytest.raises(ProtocolError):
                _CutTask(job).take(lie)
        task = _CutTask(job)
        task.take(Cut(0.5, 2.0, 10, True))
        with pytest.raises(ProtocolError):
            task.take(Cut(0.5, 2.0, 10, True))


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("SOX5yA1l24A.mp4", 0.1),  # 29.97, one keyframe, mono
        ("video236.mp4", 2.1),  # one frame a second, with B-frames, stereo
        ("car-detection.mp4", 0.1),  # 12.5 frames a second, stereo
        (
            "TrumanShow_wave_f_nm_np1_fr_med_26.avi",
            0.1,
        ),  # DivX: placeholders as keyframes, wrong times
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_clips_of_other_makers(shared, tmp_path, name, late, exact):
    film = shared / "data" / "clips" / name
    start, end = (0.2, 0.6) if film.suffix == ".avi" else (4.1, 7.5)
    clip = cut_clip(film, tmp_path / f"clip{container_for(name, exact=exact)}", start, end, exact=exact)
    assert clip.start <= start
    assert end - 0.01 <= clip.end <= end + late
    assert channels(clip.path) == channels(film)
    with VideoReader(film) as source, VideoReader(clip.path) as made:
        assert made.size == source.size
        for moment in np.linspace(start, end, 5)[:-1]:
            expected, found = source.image_at(moment, 48), made.image_at(moment - clip.start, 48)
            difference = np.asarray(expected[1], float) - np.asarray(found[1], float)
            assert np.abs(difference).mean() < 6
