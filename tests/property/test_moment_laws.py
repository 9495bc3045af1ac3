"""Laws of dense frames: which are taken, how they are put together, which of them are an item's."""

from __future__ import annotations

import gc
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gare.data.frame_sampling import sample_indices
from gare.library.index.dense_frames import DenseBlocks, DenseChooser, as_stored
from gare.library.index.moment_ranges import moment_ranges
from gare.library.search.refined_moment import FrameLine, refine
from gare.library.store.store_schema import DENSE, MOST_DENSE_FRAMES
from gare.library.store.stored_frames import intact_rows, own_frames

FEWEST, MOST = 24, 40
LONGEST_STILL = 4


def grey(level: float) -> Image.Image:
    return Image.new("RGB", (32, 18), (round(255 * level),) * 3)


@given(levels=st.lists(st.floats(0, 1), min_size=1, max_size=80), every=st.sampled_from([0.2, 1.0, 5.0]))
def test_frames_come_at_a_steady_rate_sooner_at_cuts_later_where_nothing_changes(levels, every):
    chooser = DenseChooser(every, is_short=False)
    moments = [number * chooser.step for number in range(len(levels))]
    taken = [time for time, level in zip(moments, levels, strict=True) if chooser.wants(time, grey(level))]
    assert taken[0] == 0
    gaps = [(after - before) / every for before, after in pairwise(taken)]
    assert all(0.5 - 1e-6 <= gap <= LONGEST_STILL + 1e-6 for gap in gaps)
    assert moments[-1] - taken[-1] < LONGEST_STILL * every


@given(levels=st.lists(st.sampled_from([0.1, 0.9]), min_size=2, max_size=40))
def test_every_cut_that_is_seen_gives_a_frame(levels):
    chooser = DenseChooser(1.0, is_short=False)
    taken = [chooser.wants(number / 2, grey(level)) for number, level in enumerate(levels)]
    assert all(taken[number] for number in range(1, len(levels)) if levels[number] != levels[number - 1])


@given(levels=st.lists(st.floats(0, 1), min_size=1, max_size=MOST_DENSE_FRAMES))
def test_a_short_file_gives_every_frame(levels):
    chooser = DenseChooser(1.0, is_short=True)
    assert all(chooser.wants(float(number), grey(level)) for number, level in enumerate(levels))


@given(
    gaps=st.lists(st.floats(0.1, 8), max_size=200),
    changes=st.lists(st.floats(0, 1), min_size=201, max_size=201),
    after=st.floats(0, 10),
)
def test_blocks_hold_every_frame_once_and_follow_each_other(gaps, changes, after):
    times = np.cumsum([0.0, *gaps]).tolist()
    collected: DenseBlocks[int] = DenseBlocks(is_short=False)
    blocks = []
    for number, time in enumerate(times):
        blocks += collected.add(time, number, changes[number])
    blocks += collected.rest(times[-1] + after)
    assert [number for _, _, numbers, _ in blocks for number in numbers] == list(range(len(times)))
    assert [time for *_, own in blocks for time in own] == times
    assert [start for start, *_ in blocks] == [0.0, *(end for _, end, *_ in blocks[:-1])]
    for start, end, _, own in blocks:
        assert start <= as_stored(own[0])
        assert as_stored(own[-1]) < end
    assert all(FEWEST <= len(own) < MOST for *_, own in blocks[:-1])
    assert 1 <= len(blocks[-1][3]) <= MOST


class _Frame:
    """Something that can be counted."""


@pytest.mark.parametrize("is_short", [False, True])
def test_a_hundred_thousand_frames_are_never_held_together(is_short):
    collected: DenseBlocks[_Frame] = DenseBlocks(is_short=is_short)
    num_frames = MOST_DENSE_FRAMES if is_short else 100_000
    held = 0
    for number in range(num_frames):
        deque(collected.add(float(number), _Frame(), number % 7 / 7), maxlen=0)
        if number % 5_000 == 4_999:
            held = max(held, sum(type(thing) is _Frame for thing in gc.get_objects()))
    assert held <= MOST_DENSE_FRAMES
    assert sum(len(frames) for _, _, frames, _ in collected.rest(float(num_frames))) <= MOST_DENSE_FRAMES


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_ranges_are_the_block_its_shots_and_windows_that_cover_them(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    shots_SD = torch.eye(16)[torch.randperm(16, generator=generator)[: len(lengths)]]
    frames_FD = shots_SD.repeat_interleave(torch.tensor(lengths), dim=0)[:MOST_DENSE_FRAMES]
    count, ranges = len(frames_FD), moment_ranges(frames_FD)
    assert ranges[0] == (0, count)
    assert len(set(ranges)) == len(ranges)
    assert all(0 <= first < last <= count for first, last in ranges)
    if count <= 12:
        assert ranges == [(0, count)]
        return
    ends = np.minimum(np.cumsum([0, *lengths]), count)
    shots = {(int(first), int(last)) for first, last in pairwise(ends) if first < last}
    assert shots <= set(ranges)
    windows = [(first, last) for first, last in set(ranges) - shots - {(0, count)}]
    assert all(last - first == 8 for first, last in windows)
    assert all(any(s <= first and last <= e for s, e in shots) for first, last in windows)
    for start, end in shots:
        if end - start > 8:
            own = {frame for first, last in windows if start <= first < end for frame in range(first, last)}
            assert own == set(range(start, end))


@given(
    cosines=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
    first=st.integers(0, 39),
    length=st.integers(1, 40),
    usual=st.floats(-1, 1, width=32),
)
def test_a_refined_moment_is_around_the_best_frame_of_its_range(cosines, first, length, usual):
    first = min(first, len(cosines) - 1)
    last = min(first + length, len(cosines))
    line = FrameLine([float(second) for second in range(len(cosines))], float(len(cosines)), cosines)
    moment = refine(line, float(first), float(last), usual)
    assert cosines[int(moment.best)] == max(cosines[first:last])
    assert 0 <= moment.start <= moment.best < moment.end <= len(cosines)
    level = min(usual, float(np.median(cosines)), max(cosines[first:last]))
    needed = level + 0.4 * (cosines[int(moment.best)] - level)
    inside = cosines[int(moment.start) : int(moment.end)]
    assert all(cosine >= needed - 1e-6 for cosine in inside)


@given(
    cosines=st.lists(st.floats(-1, 1, width=16), min_size=3, max_size=20), shift=st.sampled_from([0.25, -0.5])
)
def test_a_level_for_all_frames_changes_no_moment(cosines, shift):
    times = [float(second) for second in range(len(cosines))]
    moments = [
        refine(FrameLine(times, len(times) + 0.0, [c + more for c in cosines]), 1.0, 3.0, -0.125 + more)
        for more in (0.0, shift)
    ]
    assert moments[0] == moments[1]


# --- which frames of a row are an item's --------------------------------------------------------------------

DIM = 4


def row(key: str, times: list[float], start: float, end: float, generator: np.random.Generator) -> Any:
    vectors = generator.normal(size=(len(times), DIM)).astype("<f2").tobytes()
    return {"frames_key": key, "times": times, "vectors": vectors, "start": start, "end": end}


SCHEMA = pa.schema(
    {
        "frames_key": pa.string(),
        "times": pa.list_(pa.float32()),
        "vectors": pa.large_binary(),
        "start": pa.float64(),
        "end": pa.float64(),
    }
)


@given(data=st.data(), num_frames=st.integers(1, 12), seed=st.integers(0, 100))
def test_an_item_has_the_frames_of_its_range_as_by_the_slow_reference(data, num_frames, seed):
    generator, rows = np.random.default_rng(seed), []
    for number in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 30))
        times = [as_stored(time) for time in np.cumsum(generator.uniform(0.1, 2, count))]
        first = data.draw(st.integers(0, count - 1))
        last = data.draw(st.integers(first + 1, count))
        start, end = times[first] if first else 0.0, times[last] if last < count else times[-1] + 1
        kind = data.draw(st.sampled_from([f"{DENSE}:1", "window:10"]))
        rows.append(row(f"c/{kind}/0.000/{number}", times, start, end, generator))
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    for given_rows in (table, table.to_batches()[0]):
        own = own_frames(given_rows, num_frames)
        for before, after in zip(rows, own.to_pylist(), strict=True):
            vectors = np.frombuffer(before["vectors"], "<f2").reshape(-1, DIM)
            keep = list(range(len(vectors)))
            if DENSE in before["frames_key"]:
                inside = [
                    n for n, time in enumerate(before["times"]) if before["start"] <= time < before["end"]
                ]
                keep = [inside[n] for n in sample_indices(len(inside), num_frames)]
            assert after["times"] == [before["times"][n] for n in keep]
            assert after["vectors"] == vectors[keep].tobytes()
    assert intact_rows(table) == [True] * len(rows)


@pytest.mark.parametrize(("start", "end"), [(1.5, 3.0), (1.0, 2.5), (2.0, 2.0), (3.0, 1.0)])
def test_a_range_that_begins_or_ends_between_its_frames_is_damaged(start, end):
    one = row(f"c/{DENSE}:1/0.000/0", [1.0, 2.0, 3.0], start, end, np.random.default_rng(0))
    assert intact_rows(pa.Table.from_pylist([one], schema=SCHEMA)) == [False]
