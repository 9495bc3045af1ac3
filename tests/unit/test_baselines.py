"""Baselines with weights of their own, as a user meets them."""

from __future__ import annotations

import pytest
import torch

from gare import GARE, GareConfig, ObjectiveConfig, TextFeatures, VideoFeatures
from gare.errors import ConfigError
from gare.objective import training_loss
from gare.train.config import OptimizerConfig
from gare.train.optim import parameter_groups

POOLINGS = ("cross_attention", "token_wise")
TEXTS = ["a dog catches a frisbee", "rain on a window", "two people cook"]


def baseline(pooling, **settings):
    torch.manual_seed(0)
    increment = {"enabled": False, **settings.pop("increment", {})}
    values = {"backbone": {"family": "tiny"}, "temporal": {"num_layers": 1}, "increment": increment}
    return GARE(GareConfig.load({**values, "interaction": {"pooling": pooling}, **settings}))


def features(model):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 4, 3, 32, 32, generator=generator)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2:] = False
    ids, words = model.backbone.tokenize(TEXTS)
    return model.text_features(ids, words), model.video_features(pixels, mask)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_step_reaches_every_parameter_and_both_methods_agree(pooling):
    model = baseline(pooling, temperature={"learnable": True}).train()
    pairs = model.score_pairs(*features(model))
    assert pairs.increment_TVD is None
    loss = training_loss(pairs, model.logit_scale, ObjectiveConfig())
    assert list(loss.terms) == ["contrastive"]
    loss.total.backward()
    without = [
        name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()
    ]
    assert without == []
    # A bias of keys shifts all logits of a query alike; and rounding is all that may move it.
    still = [name for name, p in model.named_parameters() if not p.grad.any()]
    assert still in ([], ["pooling_net.key.bias"])
    model.eval()
    with torch.no_grad():
        text, video = features(model)
        expected = model.score(text, video, method="dense")
        for actual in (
            model.score(text, video),
            model.score(text, video, text_block=1, video_block=2),
            model.score(text, model.score_cards(video)),
            model.score_pairs(text, video).scores_TV,
        ):
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_its_weights_learn_at_the_rate_of_new_modules(pooling):
    config = OptimizerConfig(learning_rate=1e-3, image_learning_rate=1e-6, text_learning_rate=1e-6)
    rates = {
        name: group["lr"] for group in parameter_groups(baseline(pooling), config) for name in group["names"]
    }
    found = {rate for name, rate in rates.items() if name.startswith("pooling_net.")}
    assert found == {1e-3}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_saved_models_come_back_the_same(pooling, tmp_path):
    model = baseline(pooling).eval()
    model.save_pretrained(tmp_path / "model")
    loaded = GARE.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    with torch.no_grad():
        torch.testing.assert_close(loaded.score(*features(loaded)), model.score(*features(model)))


@pytest.mark.parametrize("pooling", POOLINGS)
@torch.no_grad()
def test_what_a_baseline_can_show(pooling):
    model = baseline(pooling).eval()
    text, video = features(model)
    weights = model.frame_weights(text, video)
    assert weights.pool_TVF.shape == (3, 3, 4)
    if pooling == "cross_attention":
        torch.testing.assert_close(weights.pool_TVF.sum(dim=-1), torch.ones(3, 3))
        assert weights.attention_TVHF.shape == (3, 3, 1, 4)
    else:
        assert weights.attention_TVHF is None
    torch.testing.assert_close(model.frame_weights(text, model.score_cards(video)).pool_TVF, weights.pool_TVF)
    with pytest.raises(ValueError, match="the baseline has no increments"):
        model.radii(text, video)


def test_cross_attention_has_dropout_and_starts_as_the_identity():
    model = baseline("cross_attention", increment={"num_heads": 2, "dropout": 0.5}).train()
    assert (model.pooling_net.num_heads, model.pooling_net.dropout.p) == (2, 0.5)
    assert torch.equal(model.pooling_net.value.weight, torch.eye(16))
    text, video = features(model)
    assert not torch.equal(model.score(text, video), model.score(text, video))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        model.score(text, video, method="factored")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"interaction": {"pooling": "token_wise"}},
            "is a baseline without increments; set increment.enabled",
        ),
        (
            {
                "interaction": {"pooling": "cross_attention", "context": "words"},
                "increment": {"enabled": False},
            },
            "set interaction.mask_frames = true and interaction.context = 'frames'",
        ),
        (
            {"preset": "released", "interaction": {"pooling": "token_wise"}, "increment": {"enabled": False}},
            "set interaction.mask_frames = true",
        ),
        ({"interaction": {"pooling": "max"}}, "must be 'mean' or 'text_conditioned' or 'cross_attention'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GareConfig.load(settings)


def test_bad_features_and_foreign_cards_are_refused():
    model, other = baseline("token_wise").eval(), baseline("cross_attention").eval()
    text, video = (x for x in features(model))
    with pytest.raises(ValueError, match="made by a model with other settings"):
        model.score(text, other.score_cards(video))
    words = text.words_TWD.detach().clone()
    words[0, 0] = float("nan")
    broken = TextFeatures(text.text_TD, words, text.mask_TW)
    with pytest.raises(ValueError, match="texts contain NaN"):
        model.score(broken, video)
    assert other.score(broken, video).isfinite().all()  # words are not looked at


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_score(pooling, dtype):
    model = baseline(pooling).to(dtype).eval()
    video = VideoFeatures(torch.randn(2, 3, 16).to(dtype), torch.ones(2, 3, dtype=torch.bool))
    scores = model.score(model.encode_text(TEXTS), video)
    assert scores.shape == (3, 2)
    assert scores.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
