"""Every interaction trains: a step with its paper's terms reaches every parameter and lowers the loss."""

from __future__ import annotations

import copy

import pytest
import torch

from features import random_text, random_video
from gare import INTERACTIONS, TextFeatures, VideoFeatures
from gare.interaction import build_interaction
from gare.interaction.peers import PEERS
from gare.objective import TERMS, ObjectiveConfig, training_loss
from gare.objective.neighbor_term import neighbor_adjusting

DIM, PAIRS, FRAMES, WORDS = 16, 8, 12, 14
HEADS = [{"head": head} for head in ("mean", "lstm", "transformer", "tight")]
CASES = [
    *((name, settings) for name in INTERACTIONS for settings in (HEADS if name == "clip4clip" else [{}])),
    ("ts2_net", {"select_patches": True, "num_draws": 20}),
    ("token_wise", {"weighting": "uniform"}),
    ("dmae", {"weighting": "learned"}),
]


def batch(patches: bool = True) -> tuple[TextFeatures, VideoFeatures]:
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, PAIRS, WORDS, DIM, torch.float32)
    video = random_video(generator, PAIRS, FRAMES, DIM, torch.float32)
    patches_VFPD = torch.randn(PAIRS, FRAMES, 4, DIM, generator=generator) if patches else None
    return text, VideoFeatures(video.frames_VFD, video.mask_VF, patches_VFPD)


def build(name: str, settings: dict):
    torch.manual_seed(0)
    return build_interaction(INTERACTIONS[name].Config(**settings), DIM).train()


def loss_of(interaction, text, video):
    torch.manual_seed(1)  # the same dropout and noise every time
    objective = ObjectiveConfig(dict(interaction.published_terms))
    return training_loss(interaction.score_pairs(text, video), 20.0, objective, text=text, video=video)


@pytest.mark.parametrize(
    ("name", "settings", "patches"),
    [
        (name, settings, patches)
        for patches in (False, True)
        for name, settings in CASES
        if patches or not settings.get("select_patches")  # which has to have some
    ],
    ids=str,
)
def test_one_step_reaches_every_parameter_and_lowers_the_loss(name, settings, patches):
    interaction = build(name, settings)
    text, video = batch(patches)
    before = copy.deepcopy(interaction)
    video.frames_VFD.requires_grad_()  # a method without parameters trains the towers alone
    loss = loss_of(interaction, text, video)
    assert set(interaction.published_terms) <= loss.terms.keys()
    loss.total.backward()
    trainable = {key: p for key, p in interaction.named_parameters() if p.requires_grad}
    untouched = [key for key, p in trainable.items() if p.grad is None or not p.grad.abs().max() > 0]
    assert untouched == []
    assert all(p.grad.isfinite().all() for p in trainable.values())
    if trainable:
        length = torch.stack([p.grad.norm() for p in trainable.values()]).norm()
        with torch.no_grad():
            for key, parameter in before.named_parameters():
                if key in trainable:
                    parameter -= 1e-3 / length * trainable[key].grad
        assert loss_of(before, text, video).total < loss.total


@pytest.mark.parametrize("name", list(PEERS))
def test_the_terms_of_a_paper_are_terms(name):
    interaction = build(name, {})
    assert set(interaction.published_terms) <= set(TERMS)
    assert ObjectiveConfig(dict(interaction.published_terms))


@pytest.mark.parametrize("name", list(INTERACTIONS))
def test_training_features_collect_gradients_too(name):
    interaction = build(name, {})
    text, video = batch(patches=False)
    inputs = [x.requires_grad_() for x in (text.text_TD, text.words_TWD, video.frames_VFD)]
    loss_of(interaction, text, video).total.backward()
    assert video.frames_VFD.grad.abs().max() > 0
    assert any(x.grad is not None and x.grad.abs().max() > 0 for x in inputs[:2])


@pytest.mark.parametrize("name", list(INTERACTIONS))
def test_it_says_how_fast_exact_scores_can_be_had(name):
    assert build(name, {}).fast_scoring in ("vectors", "products", "none")


def test_the_tight_head_alone_of_clip4clip_has_no_fast_way():
    found = {s["head"]: build("clip4clip", s).fast_scoring for s in HEADS}
    assert found == {"mean": "vectors", "lstm": "vectors", "transformer": "vectors", "tight": "none"}


@pytest.mark.parametrize(("words", "frames"), [(32, 4), (5, 20)])
def test_neighbor_retr_merges_texts_and_videos_of_any_length_to_one_vector(words, frames):
    """Two stages with the published ratios left two vectors of more than 24 words or 12 frames."""
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, PAIRS, words, DIM, torch.float32)
    video = random_video(generator, PAIRS, frames, DIM, torch.float32)
    interaction = build("neighbor_retr", {})
    parts = interaction.score_pairs(text, video).parts
    assert parts["merged_text"].shape == parts["merged_video"].shape == (PAIRS, DIM)
    assert loss_of(interaction, text, video).total.isfinite()


def test_videos_that_are_twice_in_a_small_batch_leave_the_neighbour_term_finite():
    """Two captions of one video make two equal columns, and of four pairs only two are no neighbours."""
    scores = torch.tensor(
        [[0.9, 0.2, 0.2, 0.3], [0.1, 0.8, 0.8, 0.2], [0.3, 0.7, 0.7, 0.1], [0.5, 0.4, 0.4, 0.6]]
    )
    scores.requires_grad_()
    loss = neighbor_adjusting(scores, torch.tensor([0.5, 0.4, 0.4, 0.3]), 1, 3.0)
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.isfinite().all()


def test_the_tight_head_does_not_pay_for_frames_that_are_not_there():
    interaction = build("clip4clip", {"head": "tight"})
    shapes = []
    interaction.tight.layers[0].register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape[1]))
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 3, WORDS, DIM, torch.float32)
    interaction.score_pairs(text, random_video(generator, 2, 4, DIM, torch.float32))
    assert shapes == [1 + 4]


def test_the_tight_head_scores_many_texts_in_blocks():
    """It once took all texts at once, as the dual encoders do: 12 GB for 476 of them."""
    interaction = build("clip4clip", {"head": "tight"}).eval()
    sizes = []
    interaction.tight.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    generator = torch.Generator().manual_seed(0)
    text = random_text(generator, 300, 3, DIM, torch.float32)
    video = random_video(generator, 2, 3, DIM, torch.float32)
    with torch.no_grad():
        scores_TV = interaction.score(text, video)
        assert max(sizes) < len(text)
        torch.testing.assert_close(scores_TV, interaction.score_pairs(text, video).scores_TV)
