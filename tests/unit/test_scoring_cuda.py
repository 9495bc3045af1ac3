"""Scoring on a GPU, fused and in plain torch, against the CPU. CI has no GPU: see docs/benchmarks.md."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from features import all_interactions, random_psi, random_text, random_video
from gare.scoring import dense, factored

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU, which CI never has", allow_module_level=True)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("num_frames", [5, 12])
@pytest.mark.parametrize("interaction", all_interactions(), ids=str)
@torch.no_grad()
def test_cuda_equals_the_cpu_in_float64(interaction, num_frames, num_heads):
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 70, 6, 64), random_video(generator, 9, num_frames, 64)
    psi = random_psi(generator, 64, num_heads)
    expected = dense.score(text, video, psi, interaction)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 0.05)):
        on_gpu = [text.to("cuda").to(dtype), video.to("cuda").to(dtype), deepcopy(psi).to("cuda", dtype)]
        scores = factored.score(*on_gpu, interaction)
        torch.testing.assert_close(scores.double().cpu(), expected, atol=tolerance, rtol=0)
