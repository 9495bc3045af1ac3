"""`numerics = "released"` from recipe to weights: `gare train` does what FIDELITY.md says the authors do.

The reference below is written from that description alone. It takes features from the towers (held to the
authors' outputs in test_released.py) and does everything after them by hand: pooling, psi, losses, clipping,
Adam, decay, schedule, and the averaging of gradients over processes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from gare import GARE
from gare.data.loader import FrameSource
from gare.data.transforms import to_bytes
from gare.train import RunConfig, train
from gare.train.optimizers import BertAdam, build_optimizer
from servers import HANG_S
from toy_data import recipe, write_dataset

NUM_FRAMES, NUM_STEPS = 4, 3  # a toy video has three frames, so one is padding; a batch is all eight pairs
TOWER_RATE, NEW_RATE, WARMUP, DECAY, CLAMP = 2e-3, 3e-3, 0.1, 0.2, 100.0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


def released_recipe(manifest):
    return RunConfig.load(
        {
            **recipe(manifest, epochs=NUM_STEPS, batch_size=8, numerics="released"),
            "data": {"manifest": str(manifest), "num_frames": NUM_FRAMES},
            "model": {
                "preset": "released",
                "encoder": {"name": "tiny"},
                "temporal": {"num_layers": 1},
                "interaction": {"dropout": 0.0},
            },
            "objective": {"preset": "released"},
            "optimizer": {
                "kind": "bert_adam",
                "learning_rate": NEW_RATE,
                "image_learning_rate": TOWER_RATE,
                "text_learning_rate": TOWER_RATE,
                "warmup": WARMUP,
                "weight_decay": DECAY,
            },
        }
    )


def read_batch(model, manifest):
    """Every training pair; padding is zero after normalising. The order of pairs changes no loss."""
    source = FrameSource.open(manifest, NUM_FRAMES)
    videos = source.manifest.videos("train")
    image_format = model.encoder.image_format
    pixels = torch.zeros(len(videos), NUM_FRAMES, 3, image_format.size, image_format.size, dtype=torch.uint8)
    mask = torch.zeros(len(videos), NUM_FRAMES, dtype=torch.bool)
    for i, video in enumerate(videos):
        frames = to_bytes(source.read(video), image_format.size)
        pixels[i, : len(frames)], mask[i, : len(frames)] = frames, True
    assert not mask.all()
    pixels = image_format.normalise(pixels)
    pixels[~mask] = 0
    return model.encoder.tokenize(source.manifest.captions("train")), (pixels, mask)


def released_loss(text, frames, mask, psi, logit_scale):
    """Rows 1, 3, 4, 9–13 and 17 of FIDELITY.md."""

    def norm(x, layer):
        return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, 1e-5)

    def linear(x, layer):
        return x @ layer.weight.T + layer.bias

    # Text-conditioned pooling of unnormalised dot products, masked after the softmax.
    weights = torch.einsum("td,vfd->tvf", text, frames).div(3).softmax(-1) * mask
    pooled = torch.einsum("tvf,vfd->tvd", weights, frames)
    # The gap to the mean of all frames, padding included; attention over all frames too.
    query = linear(norm(frames.mean(dim=1)[None] - text[:, None], psi.norm1), psi.query)
    context = norm(frames, psi.norm1)
    attention = torch.einsum("tvd,vfd->tvf", query, linear(context, psi.key)) / math.sqrt(text.shape[-1])
    attended = torch.einsum("tvf,vfd->tvd", attention.softmax(-1), linear(context, psi.value))
    hidden = norm(linear(attended, psi.out), psi.norm2)
    delta = linear(norm(hidden + linear(hidden, psi.residual), psi.norm3), psi.output)

    logits = logit_scale * F.cosine_similarity(text[:, None] + delta, pooled, dim=-1)
    own = torch.arange(len(text))  # every other caption is a negative
    contrastive = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    mu, sigma = delta.mean(dim=0), delta.std(dim=0) + 1e-6
    kl = (0.5 * (mu**2 + sigma**2 - 1) - sigma.log()).sum(dim=-1).mean()
    variance = delta.norm(dim=-1).var(dim=1).mean()
    radius = -variance if variance < 0.5 else variance.detach() * 0
    unit = F.normalize(delta, dim=-1)
    direction = (torch.exp(-2 * (1 - unit @ unit.mT)).mean(dim=(1, 2)) + 1e-8).log().mean()
    return contrastive + 1e-4 * kl + 0.01 * radius + 0.01 * direction


def schedule(step):
    progress = step / 5  # five epochs, here of one step each, however many are asked for
    return progress / WARMUP if progress < WARMUP else 0.5 * (1 + math.cos(math.pi * progress))


def reference_run(config, manifest, *, num_processes=1):
    """The weights before and after, by hand (rows 13, 14, 16)."""
    torch.manual_seed(config.seed)
    model = GARE(config.model).double()  # so that all rounding is the run's own
    (ids, words), (pixels, mask) = read_batch(model, manifest)
    pixels = pixels.double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in start.items()}
    second = {name: torch.zeros_like(p) for name, p in start.items()}
    for step in range(NUM_STEPS):
        model.zero_grad()
        text, video = model.text_features(ids, words), model.video_features(pixels, mask)
        scale = model.log_logit_scale.exp()
        released_loss(text.text_TD, video.frames_VFD, mask, model.interaction.increment_net, scale).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            encodes = name.startswith(("encoder.", "temporal."))
            gradients[name] = parameter.grad / (num_processes if encodes else 1)
        total = torch.stack([g.norm() for g in gradients.values()]).norm()
        for name, parameter in model.named_parameters():
            g = gradients[name] * min(1.0, 1 / (float(total) + 1e-6))
            g = g * min(1.0, 1 / (float(g.norm()) + 1e-6))
            momentum[name] = 0.9 * momentum[name] + 0.1 * g
            second[name] = 0.98 * second[name] + 0.02 * g * g
            update = momentum[name] / (second[name].sqrt() + 1e-6)  # no bias correction
            if not name.endswith("bias"):  # LayerNorms, embeddings and the logit scale decay too
                update = update + DECAY * parameter.detach()
            in_clip = name.startswith("encoder.") or name == "log_logit_scale"
            rate = (TOWER_RATE if in_clip else NEW_RATE) * schedule(step)
            with torch.no_grad():
                parameter -= rate * update
        with torch.no_grad():
            model.log_logit_scale.clamp_(max=math.log(CLAMP))
    return start, {name: p.detach() for name, p in model.named_parameters()}


def assert_moved_alike(found, start, expected):
    """Each parameter moved as in the reference, to a thousandth of how far it moved."""
    assert found.keys() >= expected.keys()
    for name, target in expected.items():
        moved = (target - start[name]).norm()
        is_noise = name == "interaction.increment_net.key.bias"  # which no softmax ever sees: all rounding
        assert moved > 1e-3 or is_noise, name
        assert (found[name] - target).norm() < 1e-3 * moved + (1e-7 if is_noise else 1e-8), name


def test_a_run_moves_every_weight_as_the_released_code_would(manifest, tmp_path):
    config = released_recipe(manifest)
    start, expected = reference_run(config, manifest)
    train(config, tmp_path / "run", device=torch.device("cpu"))
    assert_moved_alike(load_file(tmp_path / "run" / "last" / "model.safetensors"), start, expected)


@pytest.mark.parametrize("epochs", [3, 6])
def test_the_schedule_is_five_epochs_long_whatever_is_asked(manifest, tmp_path, epochs):
    """Row 14: fewer epochs end in mid-schedule, and in a sixth the cosine rises again."""
    config = replace(released_recipe(manifest), epochs=epochs, batch_size=4)  # two steps an epoch
    train(config, tmp_path / "run", device=torch.device("cpu"))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == pytest.approx([NEW_RATE * schedule(step / 2) for step in range(2 * epochs)])
    if epochs == 6:
        assert rates[-1] > rates[-2]


def test_two_processes_shrink_the_gradients_of_the_towers(manifest, tmp_path):
    """Row 16: with W processes the towers get 1/W of their gradient and psi all of its own."""
    config = released_recipe(manifest)
    (tmp_path / "recipe.toml").write_text(config.to_toml())
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0", "-m", "gare", "train", str(tmp_path / "recipe.toml"),
            "--out", str(tmp_path / "run"), "--device", "cpu",
        ],
        capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    start, expected = reference_run(config, manifest, num_processes=2)
    found = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert_moved_alike(found, start, expected)
    _, alone = reference_run(config, manifest)
    apart = {
        name: (alone[name] - expected[name]).norm() / (alone[name] - start[name]).norm() for name in alone
    }
    assert max(apart.values()) > 5e-3  # Adam hides most of a factor, but not all: one process moves otherwise


def test_float16_adam_is_momentum_with_a_large_rate():
    """Row 15: under 1e-3 the squared gradient is lost in float16, and eps alone divides."""
    weight = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    optimizer = BertAdam([{"params": [weight], "lr": 1e-7, "weight_decay": 0.0}], betas=(0.9, 0.98), eps=1e-6)
    weight.grad = torch.full_like(weight, 1e-4)
    optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float16
    assert not state["exp_avg_sq"].any()
    # One step of momentum SGD at rate lr / eps = 0.1: 0.1 · (1 − 0.9) · 1e-4.
    # (rtol: float16 knows 1e-7 and 1e-6 only to a quarter.)
    torch.testing.assert_close(weight.detach().float(), torch.full((4,), -1e-6), rtol=0.25, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 towers need a GPU")
def test_on_a_gpu_towers_and_their_adam_are_float16(manifest, tmp_path):
    config = released_recipe(manifest)
    train(config, tmp_path / "run", device=torch.device("cuda"))
    found = load_file(tmp_path / "run" / "last" / "model.safetensors")
    for name, tensor in found.items():
        expected = torch.float16 if name.startswith("encoder.") else torch.float32
        assert tensor.dtype == expected, name
        assert torch.isfinite(tensor).all(), name
    start, _ = reference_run(config, manifest)
    moved = [
        name for name, tensor in found.items() if not torch.equal(tensor.float(), start[name].half().float())
    ]
    assert {"interaction.increment_net.value.weight", "encoder.image.weight"} <= set(moved)


def test_groups_of_the_released_optimiser(shared):
    """Row 13 and 14: all of CLIP at one rate, the logit scale with it; the patch embedding does not learn."""
    import gare
    from gare.train.run_config import OptimizerConfig

    model = gare.load_released(shared / "golden" / "authors_tiny.checkpoint.bin")
    config = OptimizerConfig(
        kind="bert_adam", learning_rate=1e-4, image_learning_rate=1e-7, text_learning_rate=1e-7
    )
    groups = build_optimizer(model, config).param_groups
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert "encoder.vision.embeddings.patch_embedding.weight" not in rates
    for name, rate in rates.items():
        assert rate == (1e-7 if name.startswith("encoder.") or name == "log_logit_scale" else 1e-4), name
        assert decays[name] == (0.0 if name.endswith("bias") else 0.2), name
