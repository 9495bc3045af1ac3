"""Checkpoints of the authors' code: the same features, scores, losses and gradients, and clear refusals."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import gare
from gare import ObjectiveConfig
from gare.errors import CheckpointError
from gare.objective import (
    direction_diversity,
    kl_bottleneck,
    radius_spread,
    symmetric_infonce,
    term_weights,
    training_loss,
)


@pytest.fixture(scope="module")
def golden(shared):
    return shared / "golden"


@pytest.fixture(scope="module")
def model(golden):
    return gare.load_released(golden / "authors_tiny.checkpoint.bin")


@pytest.fixture(scope="module")
def io(golden):
    return load_file(golden / "authors_tiny.io.safetensors")


@pytest.fixture(scope="module")
def numbers(golden):
    return json.loads((golden / "authors_tiny.json").read_text())


def features(model, io, *, videos=6, mask="video_mask"):
    text = model.text_features(io["text_ids"], io["text_mask"])
    return text, model.video_features(io["video"][:videos], io[mask][:videos])


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@torch.no_grad()
def test_features_increments_and_scores(model, io):
    text, video = features(model, io)
    close(text.text_TD, io["text"])
    close(text.words_TWD, io["words"])
    close(video.frames_VFD, io["frames"])
    pairs = model.score_pairs(text, video)
    close(pairs.increment_TVD, io["increment"])
    close(text.text_TD[:, None] + pairs.increment_TVD, io["shifted_text"])
    close(model.interaction.pooling.pool(text.text_TD, video), io["pooled"])
    for method in ("dense", "factored"):
        close(model.score(text, video, method=method), io["scores"])


@torch.no_grad()
def test_padding_as_the_released_code_treats_it(model, io):
    text, video = features(model, io, mask="video_mask_padded")
    close(video.frames_VFD, io["frames_padded"])
    for method in ("dense", "factored"):
        close(model.score(text, video, method=method), io["scores_padded_released"])


@torch.no_grad()
def test_loss_terms(model, io, numbers):
    pairs = model.score_pairs(*features(model, io))
    assert model.logit_scale.item() == pytest.approx(numbers["logit_scale"], rel=1e-6)
    increment = pairs.increment_TVD
    terms = {
        "info_nce": symmetric_infonce(pairs.scores_TV, model.logit_scale),
        "kl_event": kl_bottleneck(increment, reduction="event"),
        "kl_per_dimension": kl_bottleneck(increment, reduction="per_dimension"),
        "direction": direction_diversity(increment, sharpness=numbers["alpha"]),
        "minus_radius_variance": radius_spread(increment.norm(dim=-1), cap=numbers["radius_variance_cap"]),
    }
    for name, term in terms.items():
        assert term.item() == pytest.approx(numbers[name], rel=1e-5), name


def test_training_loss_and_its_gradients(model, io, golden, numbers):
    model.zero_grad()
    pairs = model.score_pairs(*features(model, io, videos=5))
    config = ObjectiveConfig.load({"preset": "released"})
    weights = term_weights(config)
    assert (weights["kl"], weights["direction"]) == (numbers["beta"], numbers["lambda_dir"])
    loss = training_loss(pairs, model.logit_scale, config)
    assert loss.total.item() == pytest.approx(numbers["train_total"], rel=1e-5)
    assert loss.terms["contrastive"].item() == pytest.approx(numbers["train_info"], rel=1e-5)
    regularisers = (loss.total - loss.terms["contrastive"]).item()
    assert regularisers == pytest.approx(numbers["train_reg"], rel=1e-4)
    loss.total.backward()
    ours = {
        "clip.text_projection": model.encoder.text_projection.weight.grad.mT,
        "clip.visual.proj": model.encoder.image_projection.weight.grad.mT,
        "frame_position_embeddings.weight": model.temporal.position.grad,
        "transformerClip.resblocks.0.mlp.c_fc.weight": model.temporal.layers[0].expand.weight.grad,
    }
    for name, expected in load_file(golden / "authors_tiny.grads.safetensors").items():
        assert (ours[name] - expected).norm() < 1e-4 * expected.norm(), name
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_was_left_out_is_reported(model, numbers, caplog):
    report = model.load_report
    assert report.unknown == []
    assert len(report.loaded) == 153
    assert all(name.startswith("agent.psi.") for name in report.duplicate)
    ignored = {*report.duplicate, *report.dead}
    assert set(numbers["missing_grad_for_dead_parameters"]) - {"clip.visual.conv1.weight"} <= ignored


def test_safetensors_and_half_precision_and_ddp_prefix(golden, tmp_path, model, caplog):
    state = torch.load(golden / "authors_tiny.checkpoint.bin", weights_only=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in state.items()}, tmp_path / "a.safetensors"
    )
    again = gare.load_released(tmp_path / "a.safetensors")
    assert "loaded 153 tensors, ignored 26 duplicate, 12 dead and 0 unknown" in caplog.text
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    torch.save({f"module.{name}": tensor.half() for name, tensor in state.items()}, tmp_path / "b.bin")
    half = gare.load_released(tmp_path / "b.bin")
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.float32}


@torch.no_grad()
def test_msvd_checkpoints_skip_the_temporal_transformer(golden, io):
    """FIDELITY 5: the authors leave it out for MSVD although its weights are in the file."""
    model = gare.load_released(golden / "authors_tiny.checkpoint.bin", temporal=False)
    assert model.temporal is None
    frames = model.encoder.encode_images(io["video"].flatten(0, 1)).unflatten(0, (6, 4))
    close(model.video_features(io["video"], io["video_mask"]).frames_VFD, frames)


def test_a_loaded_checkpoint_can_be_saved_as_ours(model, io, tmp_path):
    model.save_pretrained(tmp_path)
    again = gare.GARE.from_pretrained(tmp_path)
    with torch.no_grad():
        close(again.score(*features(again, io)), io["scores"])


def wrong_files():
    yield "missing.bin", None, "does not exist or is a folder"
    yield "text.bin", b"hello", "is neither a state dict saved by torch nor safetensors"
    yield "text.safetensors", b"hello", "is neither a state dict saved by torch nor safetensors"
    yield "empty.bin", b"", "is neither a state dict saved by torch nor safetensors"
    yield "list.bin", [1, 2], "holds list, not a plain state dict"
    yield "nested.bin", {"epoch": 3, "state": {}}, "not a plain state dict of tensors"
    yield "other.bin", {"weight": torch.zeros(2)}, "not a checkpoint of the released GARE code"


@pytest.mark.parametrize(("name", "content", "message"), list(wrong_files()))
def test_wrong_files_are_refused(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        gare.load_released(tmp_path / name)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save(Payload(), tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match="is neither a state dict"):
        gare.load_released(tmp_path / "evil.bin")
    assert not (tmp_path / "ran").exists()


def test_damaged_checkpoints_name_what_is_missing(golden, tmp_path):
    state = torch.load(golden / "authors_tiny.checkpoint.bin", weights_only=True)
    torch.save({k: v for k, v in state.items() if k != "clip.ln_final.bias"}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"1 missing \(first: encoder\.text\.final_layer_norm\.bias\)"):
        gare.load_released(tmp_path / "a.bin")
    torch.save({**state, "psi.layers.1.linear1.bias": torch.zeros(64)}, tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match=r"increment net \(psi\) of several layers"):
        gare.load_released(tmp_path / "b.bin")
    torch.save({k: v for k, v in state.items() if "visual.conv1" not in k}, tmp_path / "c.bin")
    with pytest.raises(CheckpointError, match="only ViT towers"):
        gare.load_released(tmp_path / "c.bin")


@torch.no_grad()
def test_padding_is_zero_after_normalising(model):
    """Not black: black is far from zero once it is normalised, and here padding takes part."""
    size = model.encoder.image_format.size
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(256, (2, 4, 3, size, size), dtype=torch.uint8, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    pixels = model.encoder.image_format.normalise(frames)
    pixels[~mask] = 0
    expected = model.video_features(pixels, mask)
    for padding in (0, 255):  # whatever bytes a loader pads with
        frames[~mask] = padding
        close(model.encode_frames(frames, mask).frames_VFD, expected.frames_VFD)


@torch.no_grad()
def test_a_video_scores_the_same_whatever_is_encoded_with_it(model):
    """The released code pads to its number of frames always, not to the longest of a batch."""
    size = model.encoder.image_format.size
    pictures = [Image.new("RGB", (size, size), (40 * n, 255 - 30 * n, 90)) for n in range(6)]
    text = model.text_features(torch.tensor([[298, 5, 7, 299]]), torch.ones(1, 4))
    num_frames = 4
    short = model.encode_video([pictures[:1]], num_frames=num_frames)
    assert short.frames_VFD.shape[1] == num_frames
    together = model.encode_video([pictures[:1], pictures[1:5]], num_frames=num_frames)
    one_by_one = model.encode_video([pictures[:1], pictures[1:5]], num_frames=num_frames, batch_size=1)
    close(model.score(text, together)[:, :1], model.score(text, short), 1e-6)
    close(model.score(text, together), model.score(text, one_by_one), 1e-6)
