"""Baselines with weights of their own, as a user meets them."""

from __future__ import annotations

import pytest
import torch

from gare import GARE, GareConfig, ObjectiveConfig, TextFeatures, VideoFeatures
from gare.errors import ConfigError
from gare.objective import training_loss

BASELINES = ("xpool", "token_wise")
TEXTS = ["a dog catches a frisbee", "rain on a window", "two people cook"]


def baseline(name, interaction=None, **settings):
    torch.manual_seed(0)
    values = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}}
    return GARE(GareConfig.load({**values, "interaction": {"name": name, **(interaction or {})}, **settings}))


def features(model):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 4, 3, 32, 32, generator=generator)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 2:] = False
    ids, words = model.encoder.tokenize(TEXTS)
    return model.text_features(ids, words), model.video_features(pixels, mask)


@pytest.mark.parametrize("name", BASELINES)
def test_a_step_reaches_every_parameter_and_both_methods_agree(name):
    model = baseline(name, temperature={"learnable": True}).train()
    pairs = model.score_pairs(*features(model))
    assert pairs.increment_TVD is None
    loss = training_loss(pairs, model.logit_scale, ObjectiveConfig())
    assert list(loss.terms) == ["contrastive"]
    loss.total.backward()
    without = [
        parameter
        for parameter, p in model.named_parameters()
        if p.grad is None or not torch.isfinite(p.grad).all()
    ]
    assert without == []
    # A bias of keys shifts all logits of a query alike; and rounding is all that may move it.
    still = [parameter for parameter, p in model.named_parameters() if not p.grad.any()]
    assert still in ([], ["interaction.attention.key.bias"])
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


@pytest.mark.parametrize("name", BASELINES)
def test_its_weights_learn_at_the_rate_of_new_modules(name):
    from gare.train.optimizers import parameter_groups
    from gare.train.run_config import OptimizerConfig

    config = OptimizerConfig(learning_rate=1e-3, image_learning_rate=1e-6, text_learning_rate=1e-6)
    groups = parameter_groups(baseline(name), config)
    rates = {parameter: group["lr"] for group in groups for parameter in group["names"]}
    found = {rate for parameter, rate in rates.items() if parameter.startswith("interaction.")}
    assert found == {1e-3}


@pytest.mark.parametrize("name", BASELINES)
def test_saved_models_come_back_the_same(name, tmp_path):
    model = baseline(name).eval()
    model.save_pretrained(tmp_path / "model")
    loaded = GARE.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    with torch.no_grad():
        torch.testing.assert_close(loaded.score(*features(loaded)), model.score(*features(model)))


@pytest.mark.parametrize("name", BASELINES)
@torch.no_grad()
def test_what_a_baseline_can_show(name):
    model = baseline(name).eval()
    text, video = features(model)
    weights = model.frame_weights(text, video)
    assert weights.pool_TVF.shape == (3, 3, 4)
    if name == "xpool":
        torch.testing.assert_close(weights.pool_TVF.sum(dim=-1), torch.ones(3, 3))
        assert weights.attention_TVHF.shape == (3, 3, 1, 4)
    else:
        assert weights.attention_TVHF is None
    torch.testing.assert_close(model.frame_weights(text, model.score_cards(video)).pool_TVF, weights.pool_TVF)
    with pytest.raises(ValueError, match=f"the interaction '{name}' has no increments; 'gare' has"):
        model.radii(text, video)


def test_xpool_has_dropout_and_starts_as_the_identity():
    model = baseline("xpool", {"num_heads": 2, "dropout": 0.5}).train()
    attention = model.interaction.attention
    assert (attention.num_heads, attention.dropout.p) == (2, 0.5)
    assert torch.equal(attention.value.weight, torch.eye(16))
    text, video = features(model)
    assert not torch.equal(model.score(text, video), model.score(text, video))
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        model.score(text, video, method="factored")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"interaction": {"pooling": "token_wise"}, "increment": {"enabled": True}},
            "is a baseline without increments, called interaction.name = 'token_wise'",
        ),
        (
            {"interaction": {"name": "xpool", "context": "words"}},
            "unknown key 'interaction.context'; known here: dropout, name, num_heads",
        ),
        (
            {"interaction": {"name": "token_wise", "mask_frames": False}},
            "unknown key 'interaction.mask_frames'",
        ),
        ({"interaction": {"pooling": "max"}}, "must be 'mean' or 'text_conditioned', not 'max'"),
        (
            {"interaction": {"name": "max"}},
            "interaction.name: must be 'gare' or 'mean' or 'text_conditioned' or 'xpool' or 'token_wise'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        GareConfig.load(settings)


def test_bad_features_and_foreign_cards_are_refused():
    model, other = baseline("token_wise").eval(), baseline("xpool").eval()
    text, video = (x for x in features(model))
    with pytest.raises(ValueError, match="made by a model with other settings"):
        model.score(text, other.score_cards(video))
    words = text.words_TWD.detach().clone()
    words[0, 0] = float("nan")
    broken = TextFeatures(text.text_TD, words, text.mask_TW)
    with pytest.raises(ValueError, match="texts contain NaN"):
        model.score(broken, video)
    assert other.score(broken, video).isfinite().all()  # words are not looked at


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_score(name, dtype):
    model = baseline(name).to(dtype).eval()
    video = VideoFeatures(torch.randn(2, 3, 16).to(dtype), torch.ones(2, 3, dtype=torch.bool))
    scores = model.score(model.encode_text(TEXTS), video)
    assert scores.shape == (3, 2)
    assert scores.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
