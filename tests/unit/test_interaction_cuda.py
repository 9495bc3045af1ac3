"""Scoring on a GPU, fused and in plain torch, against the CPU. CI has no GPU: see docs/benchmarks.md."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from features import every_interaction, random_interaction, random_text, random_video, short
from gare.bench.resident_bench import ResidentCase, ResidentRun

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, which CI never has", allow_module_level=True)


@pytest.mark.parametrize("num_frames", [5, 12])
@pytest.mark.parametrize("config", every_interaction(), ids=short)
@torch.no_grad()
def test_cuda_equals_the_cpu_in_float64(config, num_frames):
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 70, 6, 64), random_video(generator, 9, num_frames, 64)
    interaction = random_interaction(generator, config, 64)
    expected = interaction.score_pairs(text, video).scores_TV
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 0.05)):
        on_gpu = deepcopy(interaction).to("cuda", dtype)
        scores = on_gpu.score(text.to("cuda").to(dtype), video.to("cuda").to(dtype))
        torch.testing.assert_close(scores.double().cpu(), expected, atol=tolerance, rtol=0)


def test_searches_that_are_replayed_find_what_the_first_found():
    run = ResidentRun(ResidentCase(20_000, 16, 50, scale=3.0), torch.device("cuda"))
    run.fill()
    first = run.search()
    text = run.text
    run.text = text[torch.arange(16, device="cuda").flip(0)]
    for _ in range(2):  # recorded, then replayed
        assert [one.rows for one in run.search()] == [one.rows for one in reversed(first)]
    run.text = text
    assert [one.rows for one in run.search()] == [one.rows for one in first]
    check = run.check(16)
    assert (check.num_equal, check.bounds_broken) == (16, 0)
