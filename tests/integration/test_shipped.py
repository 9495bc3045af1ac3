"""The model in the box."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import gare
from gare.errors import CheckpointError
from gare.model import shipped


@pytest.fixture(scope="module")
def model() -> gare.GARE:
    return gare.GARE.from_pretrained("gare-mini")


def test_it_tells_a_picture_from_another(model: gare.GARE) -> None:
    """Plain colours and shapes are no everyday scenes, but a trained text tower knows its paraphrases."""
    text = model.encode_text(
        ["a dog runs on the beach", "a puppy running along the sea", "a man plays a guitar"]
    )
    unit = torch.nn.functional.normalize(text.text_TD, dim=-1)
    assert unit[0] @ unit[1] > unit[0] @ unit[2] + 0.2


def test_its_files_are_small_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gare-mini"
    shutil.copytree(str(shipped.weights_folder("gare-mini")), folder)
    assert (folder / "weights.safetensors").stat().st_size < 25e6
    monkeypatch.setattr(shipped, "weights_folder", lambda name: folder)
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="sha256"):
        gare.GARE.from_pretrained("gare-mini")
    (folder / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="install gare again"):
        gare.GARE.from_pretrained("gare-mini")


def test_what_was_packed_is_what_is_read(
    model: gare.GARE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    shipped.pack(tmp_path / "model", tmp_path / "packed")
    monkeypatch.setattr(shipped, "weights_folder", lambda name: tmp_path / "packed")
    again = gare.GARE.from_pretrained("gare-mini")
    for (name, ours), theirs in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_eight_bits_move_no_weight_by_more_than_half_a_step(
    model: gare.GARE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = gare.GARE(model.config)
    torch.manual_seed(0)
    for parameter in other.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "model")
    shipped.pack(tmp_path / "model", tmp_path / "packed")
    monkeypatch.setattr(shipped, "weights_folder", lambda name: tmp_path / "packed")
    again = gare.GARE.from_pretrained("gare-mini")
    for (name, ours), theirs in zip(again.state_dict().items(), other.state_dict().values(), strict=True):
        if not (name.startswith("backbone.text.") and theirs.ndim == 2):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)
        else:
            largest = theirs.abs().amax(dim=1)
            moved = (ours - theirs).abs().amax(dim=1)
            assert (moved <= 0.51 * largest / 127 + 1e-3 * largest).all(), name
