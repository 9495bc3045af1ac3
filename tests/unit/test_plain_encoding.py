"""`GARE.encode` and `GARE.similarity`: plain vectors, and the model's own scores."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clips import steady, write_video
from gare import GARE, GareConfig

TEXTS = ["a dog runs", "rain falls on a roof", "two cats"]


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()


@pytest.fixture(scope="module")
def plain() -> GARE:
    torch.manual_seed(0)
    values = {
        "encoder": {"name": "tiny"},
        "temporal": {"num_layers": 0},
        "interaction": {"name": "mean"},
    }
    return GARE(GareConfig.load(values)).eval()


def frames(seed: int, number: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, 40, 60, 3), dtype=np.uint8)


def test_a_single_text_has_one_vector_of_length_one(model):
    one, many = model.encode(TEXTS[0]), model.encode(TEXTS)
    assert isinstance(one, np.ndarray)
    assert one.dtype == np.float32
    assert (one.shape, many.shape) == ((model.dim,), (3, model.dim))
    np.testing.assert_allclose(one, many[0], atol=1e-6)
    for column in (np.array(TEXTS), np.array(TEXTS, dtype=object)):
        np.testing.assert_array_equal(model.encode(column), many)
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-6)
    raw = model.encode(TEXTS, normalize_embeddings=False)
    np.testing.assert_allclose(raw, model.encode_text(TEXTS).text_TD.numpy(), atol=1e-6)


def test_a_path_may_begin_with_the_home_folder(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.fromarray(frames(0)[0]).save(tmp_path / "still.png")
    expected = model.encode(tmp_path / "still.png")
    np.testing.assert_array_equal(model.encode("~/still.png"), expected)
    np.testing.assert_array_equal(model.encode([Path("~/still.png")])[0], expected)


def test_a_video_may_be_a_path_an_array_or_pictures(model, tmp_path):
    write_video(tmp_path / "clip.mp4", steady(4.0))
    array = frames(0)
    pictures = [Image.fromarray(frame) for frame in array]
    expected = model.encode_video([pictures])
    for given in ([array], [torch.from_numpy(array)], [pictures], [list(array)]):
        vectors = model.encode(given)
        assert vectors.shape == (1, model.dim)
        torch.testing.assert_close(vectors.features.frames_VFD, expected.frames_VFD)
    assert model.encode(array).shape == (model.dim,)
    assert model.encode(pictures).shape == (3, model.dim)  # three videos of one frame
    assert model.encode(pictures[0]).shape == (model.dim,)
    path = tmp_path / "clip.mp4"
    by_name = model.encode([str(path), path], num_frames=2)
    assert by_name.features.frames_VFD.shape[1] == 2
    np.testing.assert_array_equal(by_name[0], by_name[1])
    pictures[0].save(tmp_path / "still.png")
    np.testing.assert_allclose(
        model.encode(str(tmp_path / "still.png")), model.encode(pictures[0]), atol=1e-6
    )


def test_kind_decides_where_a_string_could_be_either(model):
    assert model.encode("dog.mp4", kind="text").shape == (model.dim,)
    with pytest.raises(ValueError, match="kind="):
        model.encode(["a dog", "dog.mp4"])
    assert model.encode(["a dog", "dog.mp4"], kind="text").shape == (2, model.dim)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_batches_change_nothing(model, number):
    texts = [f"{'very ' * place}long" for place in range(number)]
    together, apart = model.encode(texts), model.encode(texts, batch_size=2, show_progress_bar=True)
    assert together.shape == (number, model.dim)
    np.testing.assert_allclose(together, apart, atol=1e-6)


def test_similarity_of_texts_and_videos_is_the_score_with_increments(model):
    videos = [frames(0), frames(1, 5)]
    text, video = model.encode_text(TEXTS), model.encode_video([[*map(Image.fromarray, v)] for v in videos])
    expected = model.score(text, video).detach()
    assert not torch.allclose(expected, text_cosines(text, video), atol=1e-3)  # increments do something
    t, v = model.encode(TEXTS), model.encode(videos)
    for first, second in ((t, v), (TEXTS, videos), (text, video), (t, videos)):
        scores = model.similarity(first, second)
        torch.testing.assert_close(scores, expected)
        assert not scores.requires_grad
    torch.testing.assert_close(model.similarity(v, t), expected.mT)
    torch.testing.assert_close(model.similarity(TEXTS[1], v), expected[1:2])
    torch.testing.assert_close(model.similarity(t[1:], v[np.array([False, True])]), expected[1:, 1:])
    torch.testing.assert_close(model.similarity(t[2], v[[1, 0]]), expected[2:, [1, 0]])
    torch.testing.assert_close(model.similarity(t[::-1], v[::-1]), expected.flip(0, 1))
    tensors = [model.encode(each, convert_to_tensor=True) for each in (TEXTS, videos)]
    torch.testing.assert_close(model.similarity(*tensors), expected)


def text_cosines(text, video):
    unit = torch.nn.functional.normalize
    return unit(text.text_TD, dim=-1) @ unit(video.mean(), dim=-1).mT


def test_the_product_of_plain_vectors_is_the_cosine_without_increments(model):
    t, v = model.encode(TEXTS), model.encode([frames(0), frames(1, 5)])
    product = t @ v.T
    assert type(product) is np.ndarray
    np.testing.assert_allclose(product, text_cosines(t.features, v.features).detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(model.similarity(t, t).numpy(), t @ t.T, atol=1e-6)
    np.testing.assert_allclose(model.similarity(v, v).numpy(), v @ v.T, atol=1e-6)


def test_vectors_without_their_frames_are_not_scored_as_if_they_had_them(model, plain):
    for each, works in ((model, False), (plain, True)):
        t, v = each.encode(TEXTS), each.encode([frames(0)])
        for copy in (np.array(v), 1.0 * v, torch.tensor(np.array(v)), pickle.loads(pickle.dumps(v))):
            if works:
                torch.testing.assert_close(each.similarity(t, copy), each.similarity(t, v))
            else:
                with pytest.raises(ValueError, match="plain vectors"):
                    each.similarity(t, copy)
    with pytest.raises(ValueError, match="this model has 16"):
        plain.similarity(plain.encode(TEXTS), np.zeros((1, 7), np.float32))


def test_no_gradients_and_no_dropout_unless_asked(model):
    model.train()
    try:
        assert np.array_equal(model.encode(TEXTS), model.encode(TEXTS))
        assert model.training
        assert not model.encode(TEXTS, convert_to_tensor=True).requires_grad
        for given in (TEXTS, [frames(0)]):
            vectors = model.encode(given, convert_to_tensor=True, gradients=True)
            vectors.sum().backward()
        gradients = {n for n, p in model.encoder.named_parameters() if p.grad is not None}
        assert gradients >= {"words.weight", "patches.weight"}
        with pytest.raises(ValueError, match="convert_to_tensor"):
            model.encode(TEXTS, gradients=True)
    finally:
        model.zero_grad()
        model.eval()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 3, 8, 8), np.uint8),  # channels first
        np.zeros((4, 8, 8, 3), np.float32),
        np.zeros((8, 3), np.uint8),
        [[]],
        [3],
        [["not a picture"]],
    ],
)
def test_what_is_no_video_is_refused(model, wrong):
    with pytest.raises(ValueError, match=r"frames|frame is|a video is"):
        model.encode(wrong, kind="video")


@pytest.mark.parametrize("wrong", [None, 3, b"a dog", {"text": "a dog"}, np.array("a dog")])
def test_what_is_neither_one_nor_many_is_named(model, wrong):
    with pytest.raises(ValueError, match=rf"a list of texts or of videos; got {type(wrong).__name__}"):
        model.encode(wrong)


def test_kind_has_two_values(model):
    with pytest.raises(ValueError, match="a picture is a video of one frame\\), not 'image'"):
        model.encode("a dog", kind="image")


@pytest.mark.parametrize("convert", [False, True])
def test_nothing_has_no_scores(model, convert):
    none, texts = model.encode([], convert_to_tensor=convert), model.encode(TEXTS)
    assert model.similarity(none, texts).shape == (0, 3)
    assert model.similarity(texts, none).shape == (3, 0)
    assert model.similarity([], []).shape == (0, 0)
