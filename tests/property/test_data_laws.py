"""Laws of sampling and decoding, over many frame rates, keyframe distances and wishes."""

from __future__ import annotations

import itertools
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clips import read_number, steady, write_video
from gare.data.frame_sampling import Sampling, sample_indices, sample_times
from gare.data.loader import CaptionChoice, Draw, PairSampler
from gare.data.manifest import Header, Manifest, Row
from gare.data.video import read_clip
from gare.errors import VideoError, VideoProblem

samplings = st.sampled_from(["grid", "uniform"])


@given(duration=st.floats(0.01, 20_000), num_frames=st.integers(1, 100), sampling=samplings)
def test_times_increase_inside_the_video(duration: float, num_frames: int, sampling: Sampling) -> None:
    times = sample_times(duration, num_frames, sampling)
    assert 1 <= len(times) <= num_frames
    assert all(0 <= time < max(duration, 1e-3) + 1e-3 for time in times)
    assert all(earlier < later for earlier, later in itertools.pairwise(times))


@given(num_available=st.integers(1, 500), num_frames=st.integers(1, 100), sampling=samplings)
def test_indices_are_distinct_positions(num_available: int, num_frames: int, sampling: Sampling) -> None:
    indices = sample_indices(num_available, num_frames, sampling)
    assert len(indices) == min(num_available, num_frames)
    assert indices == sorted(set(indices))
    assert 0 <= indices[0] <= indices[-1] < num_available


@settings(max_examples=40)
@given(
    first_ms=st.integers(0, 4000),
    gaps=st.lists(st.integers(20, 900), min_size=20, max_size=80),
    keyframe_every=st.integers(1, 60),
    b_frames=st.integers(0, 3),
    suffix=st.sampled_from([".mp4", ".mkv", ".ts"]),
    num_frames=st.integers(1, 20),
    sampling=samplings,
)
def test_the_frame_on_screen_is_the_one_taken(
    first_ms: int,
    gaps: list[int],
    keyframe_every: int,
    b_frames: int,
    suffix: str,
    num_frames: int,
    sampling: Sampling,
) -> None:
    """Whatever the rate, the first timestamp and the keyframes, and so whether it seeks or decodes on."""
    shown_at = [milliseconds / 1000 for milliseconds in itertools.accumulate(gaps, initial=0)]
    options = {"bf": str(b_frames), "preset": "veryfast", "x264-params": "open-gop=1"}
    with tempfile.TemporaryDirectory() as folder:
        path = write_video(
            Path(folder) / f"clip{suffix}",
            [first_ms / 1000 + time for time in shown_at],
            keyframe_every=keyframe_every,
            options=options,
        )
        clip = read_clip(path, num_frames, sampling)
    assert clip.duration > shown_at[-1]
    wanted = [
        max(0, bisect_right(shown_at, time + 1e-4) - 1)
        for time in sample_times(clip.duration, num_frames, sampling)
    ]
    assert [read_number(image) for image in clip.images] == sorted(set(wanted))


@settings(max_examples=60)
@given(
    suffix=st.sampled_from([".mp4", ".mkv", ".avi", ".ts"]),
    cut=st.floats(0.01, 1.0),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=40),
)
def test_no_damage_is_more_than_a_video_error(
    suffix: str, cut: float, damage: list[tuple[float, int]], good_files: dict[str, Path]
) -> None:
    content = bytearray(good_files[suffix].read_bytes())
    content = content[: max(1, int(cut * len(content)))]
    for place, value in damage:
        content[min(len(content) - 1, int(place * len(content)))] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"damaged{suffix}"
        path.write_bytes(content)
        try:
            clip = read_clip(path, 12)
        except VideoError as error:
            kind = error.kind
        else:
            kind = clip.damage.kind if clip.damage else None
            assert clip.images
            assert len(clip.images) == len(clip.times)
    assert kind in (None, *get_args(VideoProblem))


@pytest.fixture(scope="module")
def good_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Their paths, not what is in them: who shows a failing example shows the arguments."""
    folder = tmp_path_factory.mktemp("good")
    codecs = {".mp4": "libx264", ".mkv": "libx264", ".avi": "mpeg4", ".ts": "libx264"}
    return {
        suffix: write_video(folder / f"good{suffix}", steady(8), codec=codec)
        for suffix, codec in codecs.items()
    }


@given(
    num_videos=st.integers(2, 40),
    captions_each=st.integers(1, 4),
    batch_size=st.integers(1, 8),
    world_size=st.sampled_from([1, 2, 4]),
    epoch=st.integers(0, 3),
    choice=st.sampled_from(["all", "one_per_video"]),
)
def test_ranks_together_are_one_process_and_no_pair_repeats(
    num_videos: int, captions_each: int, batch_size: int, world_size: int, epoch: int, choice: CaptionChoice
) -> None:
    video_index = [video for video in range(num_videos) for _ in range(captions_each)]
    size = batch_size * world_size
    if (num_videos if choice == "one_per_video" else len(video_index)) < size:
        return

    def batches(rank: int, world: int) -> list[list[Draw]]:
        sampler = PairSampler(
            video_index, batch_size=size, seed=5, caption_choice=choice, rank=rank, world_size=world
        )
        sampler.start_at(epoch)
        return list(sampler)

    alone = batches(0, 1)
    shared = zip(*(batches(rank, world_size) for rank in range(world_size)), strict=True)
    assert alone == [list(itertools.chain(*parts)) for parts in shared]
    rows = [draw.row for batch in alone for draw in batch]
    assert len(rows) == len(set(rows))
    if choice == "one_per_video":
        assert len({video_index[row] for row in rows}) == len(rows)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), min_size=1),
            st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda pair: pair[0].strip(),
    )
)
@example([("a", "one\rtwo")])  # a carriage return, and nothing else that needs quotes
def test_any_text_survives_a_csv_manifest(pairs: list[tuple[str, str]]) -> None:
    rows = tuple(
        Row(video.strip(), "v.mp4", caption.strip(), "train")
        for video, caption in pairs
        if video.strip() and caption.strip()
    )
    if not rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.csv"
        Manifest(Header("any"), rows).save(path)
        assert Manifest.load(path).rows == rows
