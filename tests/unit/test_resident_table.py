"""The table that a GPU holds, its kernels in Triton's interpreter: bounds hold, lists are the true ones."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gare
from features import every_gap_aware, random_interaction, random_text, random_video, short
from gare.bench import resident_bench
from gare.bench.resident_bench import ResidentCase, ResidentCheck, ResidentRun, benchmark_resident
from gare.cli.bench_exact_command import print_resident
from gare.interaction import (
    GapAwareConfig,
    ball_bounds_cuda,
    gap_aware_cuda,
    kernel_calls_cuda,
    key_bounds_cuda,
    pair_scores_cuda,
    proven_pairs,
    resident_table,
)
from gare.interaction.ball_bounds_cuda import first_bounds
from gare.interaction.cosine_bounds_cuda import Rules
from gare.interaction.key_bounds_cuda import bounds_of
from gare.interaction.pair_scores_cuda import PairScorer
from gare.interaction.resident_cards import TextPlanes, card_bytes, make_resident
from gare.interaction.resident_table import ResidentTable, can_reside
from gare.types import VideoFeatures

CPU = torch.device("cpu")
RESIDENT = [
    config
    for config in every_gap_aware(context="frames", query="gap", normalise=False)
    if config.gap_direction == "video_minus_text" or config.pooling == "mean"
]


def videos_near_texts(generator, config, *, num_texts=5, num_videos=40, num_frames=5, dim=32, scale=1.0):
    """Frames of a video resemble each other, and a text one of the videos."""
    video = random_video(generator, num_videos, num_frames, dim)
    video.frames_VFD.mul_(0.4).add_(torch.randn(num_videos, 1, dim, generator=generator, dtype=torch.float64))
    video = video.to(torch.float16)  # as a store keeps them
    text = random_text(generator, num_texts, 2, dim)
    text.text_TD.mul_(0.7).add_(video.frames_VFD[:num_texts].double().mean(dim=1))
    interaction = random_interaction(generator, config, dim)
    with torch.no_grad():
        for parameter in interaction.increment_net.parameters():
            parameter.mul_(scale)
    return text, video, interaction


def rules_of(interaction):
    config = interaction.config
    return Rules(
        corrects_text=config.corrected_side == "text",
        sign=interaction.bound_rules.sign,
        temperature=None if config.pooling == "mean" else config.pooling_temperature,
    )


def true_lists(interaction, text, video, top):
    scores_TV = interaction.score_pairs(text, video.to(torch.float64)).scores_TV
    return scores_TV.sort(dim=1, descending=True, stable=True).indices[:, :top].tolist()


@pytest.mark.parametrize("wide_keys", [True, False])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("config", RESIDENT, ids=short)
@torch.no_grad()
def test_no_score_leaves_its_bounds(config, scale, wide_keys):
    generator = torch.Generator().manual_seed(0)
    config = replace(config, num_heads=2 if config.pooling == "mean" else 1)
    text, video, interaction = videos_near_texts(generator, config, num_videos=9, scale=scale)
    cards = make_resident(interaction.bound_rules, video, wide_keys=wide_keys)
    lower_TV, upper_TV = bounds_of(
        TextPlanes.round(text.text_TD),
        cards,
        rules_of(interaction),
    )
    scores_TV = interaction.score_pairs(text, video.to(torch.float64)).scores_TV
    assert (lower_TV <= scores_TV).all()
    assert (scores_TV <= upper_TV).all()

    # The rung before it, two videos of which are gone.
    is_here_V, first_TV = torch.ones(9, dtype=torch.bool), torch.empty(5, 9)
    is_here_V[[2, 7]] = False
    best_TG, place_TG = first_bounds(
        TextPlanes.round(text.text_TD), cards, is_here_V, first_TV, rules_of(interaction)
    )
    assert (scores_TV <= first_TV)[:, is_here_V].all()
    assert (first_TV[:, ~is_here_V] == -torch.inf).all()
    assert torch.equal(best_TG, first_TV.amax(dim=1, keepdim=True))
    assert torch.equal(place_TG[:, 0].long(), first_TV.argmax(dim=1))


def check_both_rungs(interaction, text, video):
    """No score of these pairs is outside of its bounds, on the first rung or by keys."""
    scores_TV = interaction.score_pairs(text, video.to(torch.float64)).scores_TV
    cards = make_resident(interaction.bound_rules, video, wide_keys=True)
    planes, rules = TextPlanes.round(text.text_TD), rules_of(interaction)
    first_TV = torch.empty(scores_TV.shape)
    lower_TV, upper_TV = bounds_of(planes, cards, rules)
    first_bounds(planes, cards, torch.ones(len(video), dtype=torch.bool), first_TV, rules)
    assert (scores_TV <= first_TV).all()
    assert (lower_TV <= scores_TV).all()
    assert (scores_TV <= upper_TV).all()


@pytest.mark.parametrize("length", [1.0, 1e19, 1e25])
@pytest.mark.parametrize("scale", [1.0, 1e5])
@pytest.mark.parametrize("side", ["text", "video"])
@torch.no_grad()
def test_what_float32_cannot_hold_is_no_bound(side, scale, length):
    """Increments longer than 1e9, whose squares were cut, and texts whose squares are infinite."""
    generator = torch.Generator().manual_seed(0)
    config = GapAwareConfig(corrected_side=side, pooling="text_conditioned", pooling_temperature=0.01)
    text, video, interaction = videos_near_texts(generator, config, num_videos=9, num_frames=1, scale=scale)
    text = replace(text, text_TD=length * text.text_TD)
    check_both_rungs(interaction, text, video)


@pytest.mark.parametrize("mask_frames", [True, False])
@pytest.mark.parametrize("side", ["text", "video"])
@torch.no_grad()
def test_bounds_hold_for_a_text_of_no_length(side, mask_frames):
    """Without masks, padding takes weight from real frames even there."""
    generator = torch.Generator().manual_seed(0)
    config = GapAwareConfig(corrected_side=side, pooling="text_conditioned", mask_frames=mask_frames)
    text, video, interaction = videos_near_texts(generator, config, num_videos=9)
    text.text_TD[0] = 0
    text.text_TD[1] *= 1e-25
    video.frames_VFD[:, -2:] *= 3
    video.mask_VF[:, -2:] = False
    check_both_rungs(interaction, text, video)


@torch.no_grad()
def test_bounds_are_nearly_as_narrow_as_in_float64():
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig())
    cards = make_resident(interaction.bound_rules, video, wide_keys=True)
    planes = TextPlanes.round(text.text_TD)
    lower_TV, upper_TV = bounds_of(planes, cards, rules_of(interaction))
    first_TV = torch.empty_like(upper_TV)
    first_bounds(planes, cards, torch.ones(40, dtype=torch.bool), first_TV, rules_of(interaction))
    balls = interaction.bound_cards(video, torch.float64)
    assert (first_TV - interaction.bounds(text, balls).upper_TV).max() < 1e-3
    keys = interaction.key_cards(video, balls, torch.int16)
    exact = interaction.key_bounds(text, balls, keys)
    assert (upper_TV - lower_TV).mean() < 1.2 * (exact.upper_TV - exact.lower_TV).mean() + 1e-3


@pytest.mark.parametrize("scale", [0.3, 10.0])
@pytest.mark.parametrize("side", ["text", "video"])
@torch.no_grad()
def test_lists_are_those_of_scoring_everything_in_float64(side, scale, monkeypatch):
    """In chunks on two devices, with videos that come and go, and more left than is scored at once."""
    monkeypatch.setattr(resident_table, "CHUNK", 16)
    monkeypatch.setattr(resident_table, "_SMALLEST_CHUNK", 4)
    monkeypatch.setattr(proven_pairs, "_MOST_LEFT", 60)
    monkeypatch.setattr(resident_table, "_PAIRS_AT_ONCE", 7)
    generator = torch.Generator().manual_seed(0)
    config = GapAwareConfig(corrected_side=side, pooling="text_conditioned")
    text, video, interaction = videos_near_texts(generator, config, scale=scale)
    table = ResidentTable(interaction, [CPU, CPU])
    place_of = dict(enumerate(table.add(video[:10], more=30) + table.add(video[10:])))
    assert len(table) == 40

    def check() -> list[list[int]]:
        """Lists by the number of the video, which must be those of float64 over what is there."""
        number_of = {row: number for number, row in place_of.items()}
        found = table.find(text, 3, lambda rows: video[torch.tensor([number_of[r] for r in rows.tolist()])])
        here = sorted(place_of)
        expected = true_lists(interaction, text, video[torch.tensor(here)], 3)
        lists = [[number_of[row] for row in one.rows] for one in found]
        assert lists == [[here[place] for place in places] for places in expected]
        for one in found:
            assert one.num_scored == len(here) or one.next_bound < one.scores[-1] + 1e-6
        return lists

    gone = sorted({numbers[0] for numbers in check()})
    table.remove([place_of.pop(number) for number in gone])
    assert len(table) == 40 - len(gone)
    check()
    num_rows = table.num_rows
    place_of |= zip(gone, table.add(video[torch.tensor(gone)]), strict=True)
    assert table.num_rows == num_rows  # what went has left its rows to what came
    check()


@torch.no_grad()
def test_rows_are_spread_over_the_devices_and_take_what_is_said():
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(num_heads=2), num_videos=6)
    devices = [CPU, torch.device("cpu:0")]  # two names of one device stand for two
    for wide in (True, False):
        table = ResidentTable(interaction, devices, wide_keys=wide)
        table.add(video[:3], more=4000)
        one_byte_each = table.num_bytes / table.num_rows
        assert table.num_rows == 2016  # half of what is to come; the other device gets the rest
        assert one_byte_each == card_bytes(5, 2, 32, wide_keys=wide)
        assert table._open_chunk(7, 1).device != table._chunks[0].device
    assert [len(one.rows) for one in table.find(text, 2, video.__getitem__)] == [2] * 5


@torch.no_grad()
def test_videos_of_different_lengths_are_in_one_table():
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(), num_videos=12)
    short_ones = VideoFeatures(video.frames_VFD[6:, :3], torch.ones(6, 3, dtype=torch.bool))
    table = ResidentTable(interaction, [CPU])
    rows = table.add(video[:6]) + table.add(short_ones)
    padded = VideoFeatures.cat([video[:6], short_ones])
    found = table.find(text, 3, lambda wanted: padded[torch.tensor([rows.index(r) for r in wanted.tolist()])])
    assert [[rows.index(row) for row in one.rows] for one in found] == true_lists(
        interaction, text, padded, 3
    )


@torch.no_grad()
def test_fewer_videos_than_are_wanted():
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(), num_videos=6)
    table = ResidentTable(interaction, [CPU], wide_keys=False)
    table.add(video)
    table.remove([5])
    found = table.find(text, 10, video.__getitem__)
    assert [sorted(one.rows) for one in found] == [[0, 1, 2, 3, 4]] * 5


@torch.no_grad()
def test_kernels_get_their_arguments_in_order(monkeypatch):
    """Launched as compiled they get them by place, which the interpreter does not do."""
    names_of = {}

    def checked(kernel, num_programs, tensors, numbers, constants, **more):
        shapes = getattr(kernel, "configs", [])
        plain = getattr(kernel, "fn", kernel) if shapes else kernel
        names = [*constants, *(shapes[0].kwargs if shapes else ())]
        assert list(plain.arg_names)[len(tensors) + len(numbers) :] == names
        assert all(name.endswith("_ptr") for name in plain.arg_names[: len(tensors)])
        names_of[kernel] = names
        return kernel_calls_cuda.launch(kernel, num_programs, tensors, numbers, constants, **more)

    for module in (ball_bounds_cuda, key_bounds_cuda, pair_scores_cuda, gap_aware_cuda):
        monkeypatch.setattr(module, "launch", checked)
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(), num_texts=17)
    table = ResidentTable(interaction, [CPU])
    table.add(video)
    table.find(text, 2, video.__getitem__)
    interaction = interaction.float()
    cards = interaction.cards(video.to(torch.float32))
    gap_aware_cuda.score(text.text_TD.float(), cards)
    assert len(names_of) == 8


def test_its_benchmark_fills_times_and_checks():
    case = ResidentCase(60, 3, 5, dim=32, frames=4, scale=3.0)
    run = ResidentRun(case, CPU)
    assert run.fill() > 0
    assert run.table_bytes == 60 * card_bytes(4, 1, 32, wide_keys=True)
    times = run.time()
    assert 5 <= times.scored <= 60
    assert times.scored_share == times.scored / 60
    assert run.check(2) == ResidentCheck(2, 2, 0)


def test_what_gare_bench_exact_says_of_a_gpu(capsys, monkeypatch):
    said = []
    case = ResidentCase(100, 3, 5, dim=32, frames=4, corrected_side="video")
    result = benchmark_resident(case, check=2, device=CPU, say=said.append)
    assert said[1] == "  100"
    assert result.check == ResidentCheck(2, 2, 0)
    assert result.product_ms > 0
    assert result.constants == {}  # too few items for a plan
    monkeypatch.setattr(resident_bench, "LEAST_FOR_PLANS", 100)
    times, constants = result.times, result.constants
    assert 3 * (constants["gpu_exact_fixed_ms"] + constants["gpu_exact_ns"] * 100 / 1e6) == pytest.approx(
        times.search_ms
    )
    print_resident(result)
    printed = capsys.readouterr().out
    assert "2 of 2 lists are those of float64" in printed
    assert f"{times.search_ms:.2f}" in printed


def test_only_gare_over_frames_can_reside():
    generator = torch.Generator().manual_seed(0)
    assert can_reside(random_interaction(generator, GapAwareConfig(), 8))
    for settings in ({"context": "words"}, {"query": "text"}, {"normalise": True}):
        interaction = random_interaction(generator, GapAwareConfig(**settings), 8)
        assert not can_reside(interaction)
        with pytest.raises(ValueError, match="resident bounds"):
            ResidentTable(interaction, [CPU])


@pytest.mark.parametrize("num_heads", [1, 2])
@torch.no_grad()
def test_each_text_with_its_own_video(num_heads):
    """By the reference, with its matrices multiplied out, and by the kernels."""
    generator = torch.Generator().manual_seed(0)
    for config in RESIDENT:
        config = replace(config, num_heads=num_heads)
        text, video, interaction = videos_near_texts(generator, config, num_videos=5)
        expected = interaction.score_pairs(text, video.to(torch.float64)).scores_TV.diagonal()
        assert not video.mask_VF.all()
        if config.mask_frames:  # what is in padding is never read
            video.frames_VFD[~video.mask_VF] = torch.nan
        double, scorer = video.to(torch.float64), PairScorer.of(interaction)
        for scores in (
            interaction.score_each(text, double),
            interaction.for_search().score_each(text, double),
            scorer(text.text_TD, torch.arange(5), video),
            scorer(text.text_TD.flip(0), torch.arange(5).flip(0), double),
        ):
            torch.testing.assert_close(scores, expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_frames_that_no_kernel_holds_are_scored_by_the_reference(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(), num_videos=6)
    monkeypatch.setattr(pair_scores_cuda, "_LARGEST_TILE", 16 * 32 - 1)
    monkeypatch.setattr(resident_table, "_WHOLE_AT_ONCE", 4)
    table = ResidentTable(interaction, [CPU])
    table.add(video)
    found = table.find(text, 3, video.__getitem__)
    assert [one.rows for one in found] == true_lists(interaction, text, video, 3)


@torch.no_grad()
def test_many_heads_fit_as_long_as_a_tile_holds_a_video():
    generator = torch.Generator().manual_seed(0)
    sizes = {"num_texts": 2, "num_videos": 4, "num_frames": 8}
    text, video, interaction = videos_near_texts(generator, GapAwareConfig(num_heads=8), **sizes)
    assert 8 * 8 + 4 > 64  # so that a video takes 128 columns of the kernel
    table = ResidentTable(interaction, [CPU])
    table.add(video)
    found = table.find(text, 2, video.__getitem__)
    assert [one.rows for one in found] == true_lists(interaction, text, video, 2)


def test_its_kernels_compile_for_a_gpu_and_stay_small(tmp_path):
    """Unrolled, the second one took minutes to compile: what says so on any machine is its length."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("Triton's compiler is there for Linux on x86-64 alone")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(gare.__file__).parents[1]),
    }
    driver = Path(__file__).parents[1] / "compile_kernels.py"
    done = subprocess.run([sys.executable, driver], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["first"]) == 2
    for one in found["first"]:
        assert one["spilled"] == 0
        assert one["copies"]
    assert len(found["product"]) == 2
    assert found["shapes"] == {"16": 2, "64": 2, "128": 2}
    for one in found["product"] + found["product of bytes"]:
        assert one["lines"] < 4000
        assert one["spilled"] == 0
        assert one["copies"]  # the next bytes come while these are multiplied
        assert one["stores"] == ["st.global.v4.b32"]
    for one in found["bounds"]:
        assert one["lines"] < 8000
        assert one["spilled"] == 0
        assert one["registers"] <= 128  # so that two programs of eight warps are there at a time
    for one in (*found["pair scores"], *found["scores"], *found["encoding"].values()):
        assert one["spilled"] == 0
    product = found["encoding"]["product with activation"]
    assert product["registers"] <= 256  # eight warps are in a multiprocessor at a time
    assert product["shared"] <= 227 * 1024
