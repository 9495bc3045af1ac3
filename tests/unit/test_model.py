"""The model as a user meets it: encode, score, train a step, save, load, and be told what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from features import every_interaction, short
from gare import GARE, INTERACTIONS, GareConfig, ObjectiveConfig, TextFeatures, VideoFeatures
from gare.errors import CheckpointError, VideoError
from gare.objective import training_loss

TEXTS = ["a dog catches a frisbee", "rain on a window", "two people cook"]


def tiny(**settings):
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}, **settings}))


def features(model, num_videos=3):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(num_videos, 4, 3, 32, 32, generator=generator)
    mask = torch.ones(num_videos, 4, dtype=torch.bool)
    mask[0, 2:] = False
    ids, words = model.encoder.tokenize((TEXTS * num_videos)[:num_videos])
    return model.text_features(ids, words), model.video_features(pixels, mask)


@pytest.mark.parametrize("config", every_interaction(), ids=short)
def test_every_interaction_trains_and_evaluates_on_every_axis(config):
    """A step with its paper's terms reaches every parameter, and both scoring methods agree afterwards."""
    model = tiny(interaction=config.to_values(), temperature={"learnable": True}).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    text, video = features(model)
    pairs = model.score_pairs(text, video)
    objective = ObjectiveConfig(dict(model.interaction.published_terms))
    training_loss(pairs, model.logit_scale, objective, text=text, video=video).total.backward()
    without = [name for name, x in model.named_parameters() if x.requires_grad and x.grad is None]
    assert without == (["log_logit_scale"] if pairs.are_logits else [])
    optimizer.step()
    model.eval()
    with torch.no_grad():
        text, video = features(model)
        dense = model.score(text, video, method="dense")
        torch.testing.assert_close(model.score(text, video), dense, atol=2e-5, rtol=0)
        torch.testing.assert_close(model.score_pairs(text, video).scores_TV, dense)


def test_the_width_follows_the_encoder():
    for dim in (16, 24):
        model = tiny(encoder={"name": "tiny", "dim": dim})
        assert model.dim == dim
        assert model.interaction.increment_net.query.weight.shape == (dim, dim)


def test_a_video_is_a_path_or_a_list_of_images(tiny_model, tmp_path):
    images = [Image.new("RGB", (50, 40), colour) for colour in ("red", "blue")]
    images[0].save(tmp_path / "red.png")
    video = tiny_model.encode_video([images, [images[0]], str(tmp_path / "red.png")])
    assert video.frames_VFD.shape == (3, 2, 16)
    assert video.mask_VF.tolist() == [[True, True], [True, False], [True, False]]
    torch.testing.assert_close(video.frames_VFD[1, 0], video.frames_VFD[2, 0])
    text = tiny_model.encode_text(TEXTS)
    together = tiny_model.score(text, video)
    alone = tiny_model.score(text, tiny_model.encode_video([[images[0]]]))
    torch.testing.assert_close(together[:, 1:2], alone)


def test_batches_do_not_change_features(tiny_model):
    whole, pieces = tiny_model.encode_text(TEXTS), tiny_model.encode_text(TEXTS, batch_size=1)
    torch.testing.assert_close(whole.text_TD, pieces.text_TD)
    assert torch.equal(whole.mask_TW, pieces.mask_TW)


@torch.no_grad()
def test_cards_give_the_same_scores(tiny_model):
    text, video = features(tiny_model)
    cards = tiny_model.score_cards(video)
    assert len(cards) == 3
    torch.testing.assert_close(tiny_model.score(text, cards), tiny_model.score(text, video))
    radii = tiny_model.score_pairs(text, video).increment_TVD.norm(dim=-1)
    torch.testing.assert_close(tiny_model.radii(text, cards), radii)
    assert tiny_model.frame_weights(text, cards).pool_TVF.shape == (3, 3, 4)


def test_dropout_is_never_ignored_quietly():
    model = tiny().train()
    text, video = features(model)
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        model.score(text, video, method="factored")
    assert model.score(text, video).shape == (3, 3)  # auto falls back to dense


@pytest.mark.parametrize("settings", [{}, {"preset": "released"}, {"interaction": {"name": "mean"}}], ids=str)
def test_saved_models_come_back_the_same(tmp_path, settings):
    model = tiny(**settings).eval()
    model.save_pretrained(tmp_path / "model")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "model").iterdir()}
    loaded = GARE.from_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert not loaded.training
    with torch.no_grad():
        torch.testing.assert_close(loaded.score(*features(loaded)), model.score(*features(model)))


def test_files_that_are_no_model_say_what_to_do(tmp_path, tiny_model):
    for name in (tmp_path / "missing", "nowhere"):
        with pytest.raises(CheckpointError, match="is not a folder here, and a hub id is owner/name"):
            GARE.from_pretrained(name)
    with pytest.raises(CheckpointError, match="is not a folder here, and the hub did not give it"):
        GARE.from_pretrained("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json; a model is a folder written by"):
        GARE.from_pretrained(tmp_path / "empty")

    folder = tmp_path / "model"
    tiny_model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())

    def spoil(**changes):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a GARE model that this version can read"):
        GARE.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"is a file.*gare\.load_released"):
        GARE.from_pretrained(folder / "config.json")
    spoil(surprise=1)
    with pytest.raises(CheckpointError, match="unknown key 'surprise'"):
        GARE.from_pretrained(folder)
    spoil(encoder={"name": "tiny", "dim": 8})
    with pytest.raises(
        CheckpointError, match=r"do not fit its config: \d+ of another shape \(first: encoder"
    ):
        GARE.from_pretrained(folder)
    spoil(interaction={"name": "mean"})
    with pytest.raises(
        CheckpointError, match=r"18 unexpected \(first: interaction\.increment_net\.key\.bias\)"
    ):
        GARE.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a GARE model that this version can read"):
        GARE.from_pretrained(folder)
    spoil()
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="is not a GARE model that this version can read"):
        GARE.from_pretrained(folder)


def vectors(num_texts=2, num_videos=2, dim=16):
    mask = torch.ones(num_videos, 3, dtype=torch.bool)
    return TextFeatures.from_vectors(torch.randn(num_texts, dim)), VideoFeatures(
        torch.randn(num_videos, 3, dim), mask
    )


def test_bad_features_are_refused_before_they_are_scored(tiny_model):
    text, video = vectors()
    with pytest.raises(ValueError, match="nothing to score: 0 texts and 2 videos"):
        tiny_model.score(text[:0], video)
    with pytest.raises(ValueError, match="texts of 8 and videos of 16 dimensions"):
        tiny_model.score(vectors(dim=8)[0], video)
    with pytest.raises(ValueError, match="features of 8 dimensions, but this model has 16"):
        tiny_model.score(*vectors(dim=8))
    text.text_TD[1, 3] = float("nan")
    for call in (tiny_model.score, tiny_model.score_pairs, tiny_model.radii, tiny_model.frame_weights):
        with pytest.raises(ValueError, match="NaN or infinity"):
            call(text, video)
    text, video = vectors()
    video.mask_VF[1] = False
    with pytest.raises(ValueError, match="a video without a real frame"):
        tiny_model.score(text, video)
    with pytest.raises(ValueError, match="not one of auto, factored, dense"):
        tiny_model.score(*vectors(), method="fast")
    with pytest.raises(ValueError, match="texts first, then videos: got VideoFeatures and TextFeatures"):
        tiny_model.score(video, text)
    with pytest.raises(ValueError, match="bring both to one dtype"):
        tiny_model.score(text, vectors()[1].to(torch.float64))
    with pytest.raises(ValueError, match="at least one, got a size of -1"):
        tiny_model.score(*vectors(), text_block=-1)
    with pytest.raises(ValueError, match="score cards are for method 'factored'"):
        tiny_model.score(text, tiny_model.score_cards(vectors()[1]), method="dense")
    with pytest.raises(ValueError, match="the interaction 'mean' has no increments; 'gare' has"):
        tiny(interaction={"name": "mean"}).radii(*vectors())


def test_nan_is_refused_wherever_it_would_reach_a_score():
    text, video = vectors()
    video.frames_VFD[0, 2, 0] = float("nan")
    video.mask_VF[0, 2] = False
    paper, released = tiny().eval(), tiny(preset="released").eval()
    assert paper.score(text, video).isfinite().all()  # padding is not looked at
    for call in (lambda: released.score(text, video), lambda: released.score_cards(video)):
        with pytest.raises(ValueError, match="videos contain NaN"):
            call()
    words = TextFeatures(
        text.text_TD, torch.full((2, 1, 16), float("nan")), torch.ones(2, 1, dtype=torch.bool)
    )
    with pytest.raises(ValueError, match="texts contain NaN"):
        tiny(interaction={"context": "words"}).eval().score(words, vectors()[1])
    no_word = TextFeatures(text.text_TD, text.words_TWD, torch.tensor([[True], [False]]))
    with pytest.raises(ValueError, match="a text without a word"):
        paper.score(no_word, vectors()[1])
    with pytest.raises(ValueError, match="0 videos of 16 dimensions"):
        paper.score_cards(video[:0])


def test_cards_of_another_model_are_refused():
    text, video = vectors()
    model = tiny().eval()
    for other in (
        tiny(interaction={"name": "mean"}),
        tiny(interaction={"num_heads": 2}),
        tiny(interaction={"pooling": "text_conditioned"}),
    ):
        with pytest.raises(ValueError, match="made by a model with other settings"):
            model.score(text, other.eval().score_cards(video))
    cards = model.score_cards(video).to("cpu")
    torch.testing.assert_close(model.score(text, cards), model.score(text, video))


def test_gradients_flow_as_everywhere_in_torch():
    text, video = vectors()
    model = tiny(interaction={"dropout": 0.0}).eval()
    found = []
    for method in ("dense", "factored"):
        model.zero_grad()
        model.score(text, video, method=method).sum().backward()
        found.append(model.interaction.increment_net.value.weight.grad)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)
    assert not model.score_cards(video).increment.atom_OAD.requires_grad  # kept, so without a graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_precisions_encode_and_score(dtype):
    model = tiny().to(dtype).eval()
    video = model.encode_video([[Image.new("RGB", (40, 40), "red")]])
    assert model.score(model.encode_text(TEXTS), video).shape == (3, 1)


def test_bad_inputs_to_the_towers_are_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="every one a string"):
        tiny_model.encode_text([3])
    with pytest.raises(ValueError, match=r"for a single image pass \[\[image\]\]"):
        tiny_model.encode_video([Image.new("RGB", (8, 8))])
    with pytest.raises(ValueError, match="not bytes: encode_frames takes bytes"):
        tiny_model.video_features(torch.zeros(1, 1, 3, 32, 32, dtype=torch.uint8), torch.ones(1, 1))
    with pytest.raises(
        ValueError, match=r"frames must be bytes, got torch\.float32; video_features takes floats"
    ):
        tiny_model.encode_frames(torch.zeros(1, 1, 3, 32, 32), torch.ones(1, 1))
    with pytest.raises(ValueError, match="whole numbers"):
        tiny_model.text_features(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"GareConfig\.load"):
        GARE({"encoder": {"name": "tiny"}})
    with pytest.raises(ValueError, match=r"for a single one pass \['a dog'\]"):
        tiny_model.encode_text("a dog")
    with pytest.raises(ValueError, match="at least one text"):
        tiny_model.encode_text([])
    with pytest.raises(ValueError, match="for a single one pass"):
        tiny_model.encode_video("clip.mp4")
    with pytest.raises(ValueError, match="at least one video"):
        tiny_model.encode_video([])
    with pytest.raises(ValueError, match="at least one image"):
        tiny_model.encode_video([[Image.new("RGB", (8, 8))], []])
    with pytest.raises(VideoError, match="does not exist"):
        tiny_model.encode_video([tmp_path / "missing.mp4"])
    with pytest.raises(ValueError, match=r"must both be \[texts, words\]"):
        tiny_model.text_features(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"pixels must be \[videos, frames, 3, 32, 32\]"):
        tiny_model.video_features(torch.zeros(2, 3, 32, 32), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"mask must be \[2, 3\]"):
        tiny_model.video_features(torch.zeros(2, 3, 3, 32, 32), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TextFeatures.from_vectors(torch.zeros(3)), r"text_TD must be \[T, D\]"),
        (
            lambda: TextFeatures(torch.zeros(2, 4), torch.zeros(3, 1, 4), torch.ones(3, 1).bool()),
            "does not fit",
        ),
        (
            lambda: VideoFeatures(torch.zeros(2, 4), torch.ones(2, 4).bool()),
            r"frames_VFD must be \[V, F, D\]",
        ),
        (lambda: VideoFeatures(torch.zeros(2, 3, 4), torch.ones(2, 3)), r"use mask_VF\.bool\(\)"),
        (lambda: VideoFeatures(torch.zeros(2, 3, 4), torch.ones(2, 5).bool()), r"mask_VF is \[2, 5\]"),
    ],
)
def test_features_of_the_wrong_shape_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("mask_frames", "encoded"), [(True, 5), (False, 8)])
def test_the_image_tower_sees_real_frames_only(mask_frames, encoded):
    model = tiny(interaction={"mask_frames": mask_frames}).eval()
    shown = []
    tower = model.encoder.image_features
    model.encoder.image_features = lambda pixels: shown.append(len(pixels)) or tower(pixels)
    pixels, mask = torch.randn(2, 4, 3, 32, 32), torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1]]).bool()
    video = model.video_features(pixels, mask)
    assert shown == [encoded]  # the released code lets padding take part, so there it is encoded
    everything = model.encoder.encode_images(pixels.flatten(0, 1)).unflatten(0, mask.shape)
    if mask_frames:
        everything = everything.masked_fill(~mask[..., None], 0)
    if model.temporal is not None:
        everything = model.temporal(everything, mask)
    torch.testing.assert_close(video.frames_VFD[mask], everything[mask])


@pytest.mark.parametrize(
    ("name", "trap"),
    [
        (name, trap)
        for name in INTERACTIONS
        for trap, value in INTERACTIONS[name].Config.COUNTS_PADDING.items()
        if value
    ],
)
def test_a_method_that_counts_padding_sees_the_tower_of_a_zero_picture(name, trap):
    """As published loaders give it: pictures that are zero, not vectors that are."""
    model = tiny(interaction={"name": name, trap: True}, temporal={"num_layers": 0}).eval()
    frames = torch.randint(256, (1, 2, 3, 32, 32), dtype=torch.uint8)
    mask = torch.tensor([[True, False]])
    empty_ND = model.encoder.encode_images(torch.zeros(1, 3, 32, 32))
    torch.testing.assert_close(model.encode_frames(frames, mask).frames_VFD[0, 1], empty_ND[0])
    masked = model.masking_padding()
    assert masked.interaction.masks_padding
    assert not masked.encode_frames(frames, mask).frames_VFD[0, 1].any()


@torch.no_grad()
def test_a_model_that_masks_padding_shares_the_weights_of_one_that_does_not():
    model = tiny(preset="released").eval()
    masked = model.masking_padding()
    ours, theirs = dict(masked.named_parameters()), dict(model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in ours.items()} == {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }
    assert masked.config.interaction.mask_frames
    assert not model.config.interaction.mask_frames
    assert masked.masking_padding() is masked
    text, video = features(model)
    whole = VideoFeatures(video.frames_VFD, torch.ones_like(video.mask_VF))
    torch.testing.assert_close(masked.score(text, whole), model.score(text, whole))


@torch.no_grad()
def test_padded_pixels_of_any_content_change_nothing():
    model = tiny().eval()
    text, _ = features(model)
    pixels, mask = torch.randn(2, 4, 3, 32, 32), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = model.score(text, model.video_features(pixels, mask))
    for content in (0.0, 1e6, float("nan")):
        other = pixels.clone()
        other[0, 2:] = content
        torch.testing.assert_close(model.score(text, model.video_features(other, mask)), expected)


@torch.no_grad()
def test_bytes_and_pixels_and_cached_features_are_one_way():
    """`encode_frames` normalises for `video_features`; a cache of `encoder.encode_frames` gives the same."""
    model = tiny().eval()
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(256, (2, 4, 3, 32, 32), generator=generator, dtype=torch.uint8)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = model.video_features(model.encoder.image_format.normalise(frames), mask)
    actual = model.encode_frames(frames, mask)
    torch.testing.assert_close(actual.frames_VFD, expected.frames_VFD)
    assert torch.equal(actual.mask_VF, mask)
    cached = model.encoder.encode_frames(frames.flatten(0, 1)).unflatten(0, mask.shape)
    again = model.video_features_from_cache(cached, mask)
    torch.testing.assert_close(again.frames_VFD[mask], expected.frames_VFD[mask])


@pytest.mark.parametrize("size", [10**12, 10**18, 10**30])
def test_settings_of_a_model_that_no_memory_holds_are_refused_by_name(tiny_model, tmp_path, size):
    tiny_model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    config["encoder"]["vocabulary"] = size
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json describe a model that does not fit into memory"):
        GARE.from_pretrained(tmp_path / "model")
