"""query = "paper_text": the formula of the paper's ablation on psi's input, written out slowly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from features import random_interaction, random_text, random_video
from gare import VideoFeatures
from gare.interaction import GapAwareConfig, build_interaction


def scene(**settings):
    generator = torch.Generator().manual_seed(0)
    text, video = random_text(generator, 4, 5, 8), random_video(generator, 3, 6, 8)
    config = GapAwareConfig(query="paper_text", max_frames=9, **settings)
    return random_interaction(generator, config, 8), text, video


def test_the_increment_is_the_unit_gap_from_the_updated_text_times_a_learned_length():
    net, text, video = scene()
    found_TVD = net.score_pairs(text, video).increment_TVD
    for i in range(4):
        for j in range(3):
            frames_FD = video.frames_VFD[j][video.mask_VF[j]]
            updated_D = net.increment_net(
                text.text_TD[None, i : i + 1], frames_FD[None], torch.ones(1, len(frames_FD)).bool()
            )[0, 0]
            gap_D = frames_FD.mean(dim=0) - updated_D
            cosines_F = F.cosine_similarity(text.text_TD[i], video.frames_VFD[j], dim=-1)
            cosines_F = F.pad(cosines_F * video.mask_VF[j], (0, 3))
            length = (net.length.weight[0] @ cosines_F + net.length.bias[0]).exp()
            torch.testing.assert_close(found_TVD[i, j], length * gap_D / gap_D.norm())
    torch.testing.assert_close(net.radii(text, video), found_TVD.norm(dim=-1))


def test_the_length_learns_and_the_earlier_form_has_none():
    net, text, video = scene()
    net.score_pairs(text, video).scores_TV.sum().backward()
    assert net.length.weight.grad.abs().max() > 0
    earlier = build_interaction(GapAwareConfig(query="text"), 8)
    assert not [name for name, _ in earlier.named_parameters() if name.startswith("length")]


def test_it_is_not_the_earlier_form():
    """On random tensors the two point almost opposite ways: +t′ against v − t′."""
    net, text, video = scene()
    earlier = build_interaction(GapAwareConfig(query="text"), 8).double().eval()
    earlier.increment_net.load_state_dict(net.increment_net.state_dict())
    ours, theirs = (x.score_pairs(text, video).increment_TVD for x in (net, earlier))
    assert F.cosine_similarity(ours, theirs, dim=-1).mean() < -0.5


def test_more_frames_than_the_length_reads_are_refused():
    net, text, _ = scene()
    long = VideoFeatures(torch.randn(1, 12, 8).double(), torch.ones(1, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="max_frames=12"):
        net.score(text, long)
    padded = VideoFeatures(long.frames_VFD, torch.arange(12)[None] < 9)
    short = VideoFeatures(long.frames_VFD[:, :9], torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(net.score(text, padded), net.score(text, short))
