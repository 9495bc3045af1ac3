"""What each trap of published code does: off by default, and on it changes scores the way it says."""

from __future__ import annotations

import pytest
import torch

from features import random_text, random_video
from gare import INTERACTIONS, TextFeatures, VideoFeatures
from gare.interaction import build_interaction
from gare.interaction.interaction import score_in_blocks
from gare.interaction.peers import PEERS
from gare.objective import ObjectiveConfig, training_loss

DIM = 16
TRAPS = [(name, trap) for name in INTERACTIONS for trap in INTERACTIONS[name].Config.TRAPS]
OF_TRAINING = ("leaky_padding", "attend_padding")
CONTENT = 3.0


def build(name: str, **settings):
    torch.manual_seed(0)
    interaction = build_interaction(INTERACTIONS[name].Config(**settings), DIM)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in interaction.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return interaction.eval()


def batch(number: int = 6) -> tuple[TextFeatures, VideoFeatures]:
    """Texts and videos whose mean is not zero, so that cosines of either sign occur; padding is zero."""
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, number, 8, DIM, torch.float32)
    video = random_video(generator, number, 6, DIM, torch.float32)
    patches_VFPD = torch.randn(number, 6, 4, DIM, generator=generator)
    return text, VideoFeatures(video.frames_VFD - 1, video.mask_VF, patches_VFPD)


def padded(text: TextFeatures, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
    """The same with two more padded words and frames that hold something."""
    texts, frames = text.pad(text.mask_TW.shape[1] + 2), video.pad(video.mask_VF.shape[1] + 2)
    return (
        TextFeatures(
            texts.text_TD, texts.words_TWD.masked_fill(~texts.mask_TW[..., None], CONTENT), texts.mask_TW
        ),
        VideoFeatures(
            frames.frames_VFD.masked_fill(~frames.mask_VF[..., None], CONTENT),
            frames.mask_VF,
            frames.patches_VFPD.masked_fill(~frames.mask_VF[..., None, None], CONTENT),
        ),
    )


def change(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


@pytest.mark.parametrize(("name", "trap"), TRAPS)
def test_a_trap_is_off_by_default_and_says_what_it_does(name, trap):
    config = INTERACTIONS[name].Config
    assert getattr(config(), trap) is False
    assert len(config.TRAPS[trap].split()) > 8


@pytest.mark.parametrize(
    ("name", "trap"),
    [(n, t) for n, t in TRAPS if t in ("zero_padding", "late_mask", "count_padding", "expand_queries")],
)
def test_with_it_padding_counts_and_without_it_does_not(name, trap):
    text, video = batch()
    more_text, more_video = padded(text, video)
    extra = {"sampled_scores": False} if name == "diffusion_ret" else {}
    if (name, trap) == ("diffusion_ret", "late_mask"):
        off, on = build(name), build(name, late_mask=True)
        assert change(off.pooled(text, video), off.pooled(text, more_video)) < 1e-5
        assert change(on.pooled(text, video), on.pooled(text, more_video)) > 1e-3
        return
    if name == "uatvr":  # it always pads to max_words: with the trap, padding always counts
        text = TextFeatures(text.text_TD, text.words_TWD + 1, text.mask_TW)
        on, off = (
            build_interaction(INTERACTIONS[name].Config(zero_padding=is_on, num_layers=1), DIM).eval()
            for is_on in (True, False)
        )
        off.load_state_dict(on.state_dict())
        assert change(on.score(text, video), off.score(text, video)) > 1e-3
        return
    off, on = build(name, **extra), build(name, **{trap: True}, **extra)
    assert change(off.score(text, video), off.score(more_text, more_video)) < 1e-5
    assert change(on.score(text, video), on.score(more_text, more_video)) > 1e-3


@pytest.mark.parametrize(("name", "trap"), [(n, t) for n, t in TRAPS if t in OF_TRAINING])
def test_with_it_padding_changes_the_loss(name, trap):
    def loss(interaction, text, video) -> float:
        torch.manual_seed(0)
        objective = ObjectiveConfig(dict(interaction.published_terms))
        pairs = interaction.train().score_pairs(text, video)
        terms = training_loss(pairs, 20.0, objective, text=text, video=video).terms
        return sum(value.item() for key, value in terms.items() if key != "contrastive")

    text, video = batch()
    video = VideoFeatures(video.frames_VFD, video.mask_VF)
    holding = [
        (
            TextFeatures(
                text.text_TD, text.words_TWD.masked_fill(~text.mask_TW[..., None], value), text.mask_TW
            ),
            VideoFeatures(video.frames_VFD.masked_fill(~video.mask_VF[..., None], value), video.mask_VF),
        )
        for value in (0.0, CONTENT)
    ]
    off, on = ([loss(build(name, **{trap: is_on}), *each) for each in holding] for is_on in (False, True))
    assert off[0] == pytest.approx(off[1], rel=1e-4)
    assert abs(on[0] - on[1]) > 3e-4 * abs(on[0])


def test_emcl_scores_depend_on_the_block():
    text, video = batch()
    on, off = build("emcl", over_block=True, num_bases=4), build("emcl", num_bases=4)
    whole, parts = on.score(text, video), score_in_blocks(on.score_pairs, text, video, text_block=2)
    assert change(whole, parts) > 1e-3
    assert change(off.score(text, video), score_in_blocks(off.score_pairs, text, video, text_block=2)) < 1e-5


def test_emcl_forgets_its_basis():
    text, video = batch()
    for forget in (False, True):
        learned = build("emcl", num_bases=4, forget_basis=forget)
        learned.basis_1K.copy_(torch.tensor([[0.1, -0.7, 0.4, 0.9]]))
        torch.manual_seed(7)
        loaded = build_interaction(learned.config, DIM).eval()
        loaded.load_state_dict(learned.state_dict())
        assert (change(loaded.score(text, video), learned.score(text, video)) > 1e-4) == forget


def test_tmass_tells_every_video_its_own_caption():
    """On features without any signal the right pair wins far more often than one in twenty-four."""
    generator = torch.Generator().manual_seed(3)
    text = random_text(generator, 24, 3, DIM, torch.float32)
    video = random_video(generator, 24, 6, DIM, torch.float32)

    def recall(**settings) -> float:
        torch.manual_seed(0)
        method = build_interaction(INTERACTIONS["tmass"].Config(**settings), DIM).eval()
        scores_TV = method.score(text, video)
        return (scores_TV.argmax(dim=0) == torch.arange(24)).float().mean().item()

    assert recall() <= 3 / 24 + recall(own_caption=True)
    assert recall(own_caption=True) >= 2 * max(recall(), 1 / 24)
    with pytest.raises(ValueError, match="as many texts as videos"):
        build("tmass", own_caption=True).score(text[:3], video)


def test_ts2_net_masks_the_wrong_frames():
    text, video = batch()
    options = {"select_patches": True, "num_layers": 1, "max_frames": 6}
    on, off = build("ts2_net", tiled_mask=True, **options), build("ts2_net", **options)
    assert change(on.score(text, video), off.score(text, video)) > 1e-3
    every = VideoFeatures(video.frames_VFD, torch.ones_like(video.mask_VF), video.patches_VFPD)
    assert change(on.score(text, every), off.score(text, every)) < 1e-6
    _, mask_VF = on.video_frames(video)
    assert torch.equal(mask_VF, video.mask_VF[:, [4 * frame % 6 for frame in range(6)]])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ts2_net", {"select_patches": True, "noisy_evaluation": True, "num_draws": 3, "noise_std": 1.0}),
        ("diffusion_ret", {"sampled_scores": True}),
    ],
)
def test_two_evaluations_differ(name, settings):
    text, video = batch()
    on = build(name, **settings)
    torch.manual_seed(0)
    first = on.score(text, video)
    assert change(first, on.score(text, video)) > 1e-4
    trap = next(t for t in INTERACTIONS[name].Config.TRAPS if settings.get(t))
    off = build(name, **{**settings, trap: False})
    assert change(off.score(text, video), off.score(text, video)) == 0


def test_diffusion_ret_scores_depend_on_the_other_candidates():
    text, video = batch()
    on = build("diffusion_ret", sampled_scores=True)
    torch.manual_seed(0)
    whole = on.score(text[:1], video)[:, :2]
    torch.manual_seed(0)
    assert change(whole, on.score(text[:1], video[:2])) > 1e-2


def test_every_trap_has_a_test_here():
    covered = {
        "zero_padding", "late_mask", "count_padding", "expand_queries", "over_block", "forget_basis",
        "own_caption", "tiled_mask", "noisy_evaluation", "sampled_scores", *OF_TRAINING,
    }  # fmt: skip
    assert {trap for _, trap in TRAPS} == covered
    assert {name for name, _ in TRAPS} >= set(PEERS) - {"clip4clip", "pig"}
