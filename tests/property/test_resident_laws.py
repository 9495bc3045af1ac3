"""A table on a GPU, its kernels interpreted: whatever comes and goes, lists are those of float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from features import every_gap_aware, random_interaction, random_text, random_video
from gare.interaction import resident_table
from gare.interaction.resident_table import ResidentTable
from gare.types import VideoFeatures

CPU = torch.device("cpu")
CONFIGS = [
    config
    for heads in (1, 2)
    for config in every_gap_aware(context="frames", query="gap", normalise=False, num_heads=heads)
    if config.mask_frames
]
CHANGES = st.lists(st.sampled_from(["add", "remove", "ask"]), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_table, "_SMALLEST_CHUNK", 5)
    monkeypatch.setattr(resident_table, "CHUNK", 8)


@given(
    seed=st.integers(0, 10**6),
    config=st.sampled_from(CONFIGS),
    scale=st.sampled_from([0.3, 1.0, 10.0]),
    wide_keys=st.booleans(),
    changes=CHANGES,
)
@settings(max_examples=8)
@torch.no_grad()
def test_lists_are_those_of_float64(seed, config, scale, wide_keys, changes):
    generator = torch.Generator().manual_seed(seed)
    interaction = random_interaction(generator, config, 16)
    for parameter in interaction.parameters():
        parameter.mul_(scale)
    video = random_video(generator, 30, 3, 16).to(torch.float16)
    text = random_text(generator, 2, 2, 16)
    table = ResidentTable(interaction, [CPU, torch.device("cpu:0")], wide_keys=wide_keys)
    row_of: dict[int, int] = {}
    left = list(range(30))
    for change in ["add", *changes, "ask"]:
        if change == "add":
            some, left = left[:7], left[7:]
            row_of |= zip(some, table.add(video[torch.tensor(some)]), strict=True) if some else ()
        elif change == "remove" and row_of:
            gone = sorted(row_of)[seed % len(row_of) :][:3]
            table.remove([row_of.pop(number) for number in gone])
            left += gone
        elif row_of:
            check(table, interaction, text, video, row_of, top=1 + seed % 4)


def check(table, interaction, text, video: VideoFeatures, row_of: dict[int, int], *, top: int) -> None:
    number_of = {row: number for number, row in row_of.items()}
    assert len(table) == len(number_of)

    def fetch(rows: torch.Tensor) -> VideoFeatures:
        return video[torch.tensor([number_of[row] for row in rows.tolist()])]

    here = sorted(row_of)
    scores_TV = interaction.score_pairs(text, video[torch.tensor(here)].to(torch.float64)).scores_TV
    best_TK = scores_TV.sort(dim=1, descending=True).values[:, :top]
    for one, best in zip(table.find(text, top, fetch), best_TK.tolist(), strict=True):
        assert one.scores == pytest.approx(best, abs=1e-12)
        assert all(row in number_of for row in one.rows)
        assert one.num_scored == len(here) or one.next_bound <= one.scores[-1] + 1e-6
