"""Lists of moments, read back by OpenTimelineIO and by hand: the same ranges, to the frame."""

from __future__ import annotations

import csv
import io
import re
import warnings
from fractions import Fraction
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

from gare.data.decoder_messages import Media
from gare.data.timecode import RATES, can_drop, nearest_rate, read_timecode, write_timecode
from gare.errors import ClipError
from gare.library.editing.edl_format import write_edl
from gare.library.editing.fcpxml_format import write_fcpxml
from gare.library.editing.list_formats import FORMATS, choose_format, save_list, write_list
from gare.library.editing.moments import Moment, read_clock
from gare.library.editing.otio_format import write_otio
from gare.library.editing.timeline import Timeline, TimelineClip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its plugins
    import opentimelineio as otio

FILM, NTSC, NTSC_60 = Fraction(24000, 1001), Fraction(30000, 1001), Fraction(60000, 1001)
STARTS = (0, 24, 96, 1800, 107_892)
"""First frames of five moments: a minute and an hour of drop-frame among them."""
HOSTILE = "/videos/a, b;=#\\\n#EXTVLCOPT:x --> <&>\u00e9.mp4"


def media(rate: Fraction, **changes: object) -> Media:
    facts = {
        "duration": 7200.0,
        "rate": (rate.numerator, rate.denominator),
        "width": 1920,
        "height": 1080,
        "sample_rate": 48_000,
        "num_audio": 1,
        "num_channels": 2,
        "is_variable": False,
        "is_drop_frame": False,
        "first_frame": 0,
    }
    return Media(**{**facts, **changes})


def five(rate: Fraction, **changes: object) -> Timeline:
    """Five moments of five files of this rate, 48, 72, … frames long."""
    clips = [
        TimelineClip(
            Moment(
                f"/videos/film {number}.mp4",
                float(start / rate),
                float((start + length) / rate),
                "ab",
                0.5,
                1.0,
            ),
            media(rate, **changes),
        )
        for number, (start, length) in enumerate(zip(STARTS, (48, 72, 96, 120, 144), strict=True))
    ]
    return Timeline("a goal", tuple(clips))


def wanted(timeline: Timeline) -> list[tuple[int, int]]:
    return [(clip.media.first_frame + clip.first, clip.num_frames) for clip in timeline.clips]


def read(text: str, adapter: str, **options: object) -> otio.schema.Timeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its adapters use what Python gives up
        return otio.adapters.read_from_string(text, adapter, **options)


def ranges(track: otio.schema.Track) -> list[tuple[float, float]]:
    found = [clip.source_range for clip in track.find_clips()]
    return [(part.start_time.value, part.duration.value) for part in found]


def test_the_five_moments_are_those_frames():
    assert wanted(five(NTSC)) == list(zip(STARTS, (48, 72, 96, 120, 144), strict=True))


@pytest.mark.parametrize(
    "rate", [FILM, Fraction(24), Fraction(25), NTSC, Fraction(30), Fraction(50), NTSC_60]
)
def test_an_edl_is_read_back_to_the_frame(rate):
    timeline = five(rate)
    text = write_edl(timeline)
    back = read(text, "cmx_3600", rate=float(rate))
    assert [track.name for track in back.tracks] == ["V", "A1", "A2"]
    for track in back.tracks:
        assert ranges(track) == wanted(timeline)
    assert ("FCM: DROP FRAME" in text) == can_drop(rate)
    assert (";" in text) == can_drop(rate)
    names = [clip.name for clip in back.tracks[0].find_clips()]
    assert names == [f"film {number}.mp4" for number in range(5)]
    record = re.search(r"C {8}(\S+) (\S+) (\S+) (\S+)$", text, re.MULTILINE)
    assert record is not None
    assert record[3] == ("01:00:00;00" if can_drop(rate) else "01:00:00:00")


@pytest.mark.parametrize("rate", [FILM, Fraction(25), NTSC, NTSC_60, Fraction(15)])
def test_an_otio_is_read_back_to_the_frame(rate):
    timeline = five(rate)
    back = otio.adapters.read_from_string(write_otio(timeline), "otio_json")
    assert back.name == "a goal"
    assert [track.kind for track in back.tracks] == ["Video", "Audio"]
    for track in back.tracks:
        assert ranges(track) == wanted(timeline)
    for clip, expected in zip(back.tracks[0].find_clips(), timeline.clips, strict=True):
        assert clip.source_range.start_time.rate == float(rate)
        assert unquote(urlsplit(clip.media_reference.target_url).path) == expected.moment.path
        assert clip.media_reference.available_range.duration.value == expected.num_file_frames
    assert otio.adapters.read_from_string(back.to_json_string(), "otio_json").is_equivalent_to(back)


def test_a_file_without_sound_leaves_a_gap_in_the_track_of_sound():
    clips = list(five(Fraction(25)).clips)
    clips[1] = TimelineClip(clips[1].moment, media(Fraction(25), num_channels=0, num_audio=0, sample_rate=0))
    timeline = Timeline("x", tuple(clips))
    picture, sound = otio.adapters.read_from_string(write_otio(timeline), "otio_json").tracks
    assert isinstance(sound[1], otio.schema.Gap)
    assert sound.duration() == picture.duration()
    assert re.search(r"^002  AX       V     C", write_edl(timeline), re.MULTILINE)


def seconds(text: str) -> Fraction:
    return Fraction(text.removesuffix("s"))


@pytest.mark.parametrize(
    "rate", [FILM, Fraction(24), Fraction(25), NTSC, Fraction(30), NTSC_60, Fraction(15)]
)
def test_an_fcpxml_has_exact_times(rate):
    timeline = five(rate)
    root = ElementTree.fromstring(write_fcpxml(timeline))
    formats = {each.get("id"): each for each in root.iter("format")}
    sequence = root.find("./project/sequence")
    assert seconds(formats[sequence.get("format")].get("frameDuration")) == 1 / timeline.rate
    assert sequence.get("tcFormat") == ("DF" if can_drop(rate) else "NDF")
    assert sequence.get("audioLayout") == "stereo"
    assets = {each.get("id"): each for each in root.iter("asset")}
    offset = Fraction(0)
    for clip, expected in zip(root.iter("asset-clip"), timeline.clips, strict=True):
        asset = assets[clip.get("ref")]
        assert seconds(formats[asset.get("format")].get("frameDuration")) == 1 / rate
        assert (asset.get("audioChannels"), asset.get("audioRate")) == ("2", "48000")
        assert unquote(urlsplit(asset.get("src")).path) == expected.moment.path
        assert seconds(clip.get("start")) * rate == expected.first
        assert seconds(clip.get("duration")) * rate == expected.num_frames
        assert seconds(clip.get("offset")) == offset
        offset += seconds(clip.get("duration"))
    assert seconds(sequence.get("duration")) == offset


@pytest.mark.parametrize("rate", [24, 25, 30])
def test_an_fcpxml_is_read_back_to_the_frame(rate):
    """At whole rates: OpenTimelineIO's reader takes 23.976 for 23, and rounds some times a frame down."""
    timeline = five(Fraction(rate))
    back = read(write_fcpxml(timeline), "fcpx_xml")
    assert isinstance(back, otio.schema.Timeline)
    assert ranges(back.tracks[0]) == wanted(timeline)
    assert {clip.source_range.start_time.rate for clip in back.find_clips()} == {rate}


def test_time_codes_of_the_files_are_used():
    timeline = five(NTSC, first_frame=107_892, is_drop_frame=True)
    back = read(write_edl(timeline), "cmx_3600", rate=float(NTSC))
    assert ranges(back.tracks[0]) == [(107_892 + start, length) for start, length in wanted(five(NTSC))]
    plain = five(NTSC, first_frame=108_000, is_drop_frame=False)
    assert "FCM: NON-DROP FRAME" in write_edl(plain)
    assert "01:00:00:00 01:00:01:18" in write_edl(plain)


def test_files_of_several_rates_are_said_and_keep_their_moments():
    clips = (*five(Fraction(25)).clips, *five(NTSC).clips[:2])
    timeline = Timeline("x", clips)
    assert timeline.rate == 25
    back = read(write_edl(timeline), "cmx_3600", rate=25)
    for clip, expected in zip(back.tracks[0].find_clips(), clips, strict=True):
        assert clip.source_range.start_time.to_seconds() == pytest.approx(expected.moment.start, abs=0.02)
        assert clip.source_range.duration.to_seconds() == pytest.approx(
            expected.moment.end - expected.moment.start, abs=0.04
        )
    starts = [
        seconds(each.get("start"))
        for each in ElementTree.fromstring(write_fcpxml(timeline)).iter("asset-clip")
    ]
    assert starts[-1] == 24 / NTSC


def test_surround_is_counted():
    text = write_edl(five(Fraction(25), num_channels=6))
    assert "AA/V" in text
    assert "AUD   3  4  5  6" in text
    assert read(text, "cmx_3600", rate=25).tracks[0].name == "V"
    assert 'audioChannels="6"' in write_fcpxml(five(Fraction(25), num_channels=6))


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate <= 60])
def test_time_codes_agree_with_opentimelineio(rate):
    for frame in (0, 1, 23, 59, 1799, 1800, 1801, 17_981, 17_982, 107_891, 107_892, 215_784, 2_000_000):
        if frame >= 86_400 * rate:
            continue
        text = write_timecode(frame, rate, drop=can_drop(rate))
        assert read_timecode(text, rate) == (frame, can_drop(rate))
        assert text == otio.opentime.to_timecode(otio.opentime.RationalTime(frame, float(rate)), float(rate))


def test_rates_that_files_state():
    assert nearest_rate(Fraction("29.97")) == NTSC
    assert nearest_rate(Fraction(2997, 125)) == FILM
    assert nearest_rate(Fraction("59.94")) == NTSC_60
    assert nearest_rate(Fraction(25)) == 25
    assert nearest_rate(Fraction("14.5")) == Fraction(29, 2)


MOMENTS = [
    Moment("/videos/one.mp4", 12.5, 20.25, "a1", 0.75, 15.0),
    Moment(HOSTILE, 3600.0, 3601.5, "b2", 0.5, 3600.5),
    Moment("/videos/one.mp4", 1.0, 2.0, "c3", 0.25, 1.5),
]


def test_a_playlist_for_vlc():
    lines = write_list(MOMENTS, "m3u8", "a\ngoal").text.splitlines()
    assert lines[:2] == ["#EXTM3U", "#PLAYLIST:a\\ngoal"]
    entries = [lines[start : start + 4] for start in range(2, len(lines), 4)]
    for (info, start, stop, address), moment in zip(entries, MOMENTS, strict=True):
        assert info.startswith(f"#EXTINF:{moment.end - moment.start:.3f},")
        assert float(start.removeprefix("#EXTVLCOPT:start-time=")) == moment.start
        assert float(stop.removeprefix("#EXTVLCOPT:stop-time=")) == moment.end
        assert unquote(urlsplit(address).path) == moment.path


def test_a_list_for_mpv():
    data = write_list(MOMENTS, "mpv", "x").text.encode()
    header, _, data = data.partition(b"\n")
    assert header == b"# mpv EDL v0"
    for moment in MOMENTS:
        length, data = re.fullmatch(rb"%(\d+)%(.*)", data, re.DOTALL).groups()
        path, data = data[: int(length)], data[int(length) :]
        assert path.decode() == moment.path
        times = re.match(rb",([\d.]+),([\d.]+),title=%(\d+)%", data)
        assert (float(times[1]), float(times[2])) == (moment.start, moment.end - moment.start)
        data = data[times.end() + int(times[3]) + 1 :]
    assert data == b""


def test_a_table():
    rows = list(csv.DictReader(io.StringIO(write_list(MOMENTS, "csv", "x").text)))
    found = [
        (row["path"], float(row["start"]), float(row["end"]), float(row["best"]), row["id"]) for row in rows
    ]
    assert found == [(each.path, each.start, each.end, each.best, each.id) for each in MOMENTS]
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert all(read_clock(row["start_clock"]) == float(row["start"]) for row in rows)


def test_chapters_of_one_file_are_in_its_time_and_order():
    text = write_list([MOMENTS[0], MOMENTS[2]], "chapters", "x").text
    assert re.findall(r"START=(\d+)\nEND=(\d+)", text) == [("1000", "2000"), ("12500", "20250")]


def test_chapters_of_several_files_follow_each_other():
    text = write_list(MOMENTS, "chapters", "x").text
    assert text.startswith(";FFMETADATA1\n")
    assert re.findall(r"START=(\d+)\nEND=(\d+)", text) == [("0", "7750"), ("7750", "9250"), ("9250", "10250")]
    titles = re.findall(r"^title=(.*)$", text, re.MULTILINE)
    assert len(titles) == 4
    assert re.sub(r"\\(.)", r"\1", titles[2]) == MOMENTS[1].title
    vtt = write_list(MOMENTS, "webvtt", "x").text
    assert vtt.startswith("WEBVTT\n\n1\n00:00:00.000 --> 00:00:07.750\n")
    assert vtt.count(" --> ") == 3
    assert "<" not in vtt


def test_formats_by_name_and_by_ending(tmp_path):
    for name, each in FORMATS.items():
        assert choose_format(None, tmp_path / f"list{each.suffix}") == choose_format(name, None) == name
    with pytest.raises(ClipError, match="choose one of m3u8, mpv"):
        choose_format("avi", None)
    with pytest.raises(ClipError, match="--format"):
        choose_format(None, tmp_path / "list.txt")


def test_a_list_is_not_written_over_another(tmp_path):
    path = tmp_path / "list.csv"
    save_list("mine", path)
    with pytest.raises(ClipError, match="nothing is overwritten"):
        save_list("other", path)
    assert path.read_text() == "mine"
    with pytest.raises(ClipError, match="cannot be written"):
        save_list("x", tmp_path / "none" / "list.csv")


def test_a_list_of_nothing_and_of_too_much():
    with pytest.raises(ClipError, match="no hit"):
        write_list([], "csv", "x")
    with pytest.raises(ClipError, match="999"):
        write_edl(Timeline("x", five(Fraction(25)).clips * 200))


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1:60", "1:2:3:4", "nan", "inf", "1e3:0", "1:-2"])
def test_what_is_no_time(text):
    with pytest.raises(ClipError, match="is no time"):
        read_clock(text)
