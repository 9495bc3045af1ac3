"""The model in the box."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import gare
from gare.cli.main import app
from gare.errors import CheckpointError, LibraryError
from gare.library.library import model_stamp
from gare.library.store import open_store
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


def test_it_scores_as_when_it_was_packed(model: gare.GARE) -> None:
    """A change of code that moves its scores would mix two kinds of vectors in a library."""
    text = model.encode_text(["a red light fades", "rain", "two dogs catch a ball"])
    pixels = torch.randn(2, 3, 3, 256, 256, generator=torch.Generator().manual_seed(1))
    video = model.video_features(pixels, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())
    expected = torch.tensor([[0.24398, 0.25211], [0.21332, 0.22885], [-0.02051, -0.02156]])
    torch.testing.assert_close(model.score(text, video), expected, atol=1e-4, rtol=0)
    assert model.fingerprint() == "79db0790d0b21a3c1d0402acd13b8457"


def test_its_files_are_small_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gare-mini"
    shutil.copytree(str(shipped.weights_folder("gare-mini")), folder)
    assert (folder / "weights.safetensors").stat().st_size < 45e6
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
    other = gare.GARE(model.config, pretrained_towers=False)
    torch.manual_seed(0)
    for parameter in other.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "model")
    shipped.pack(tmp_path / "model", tmp_path / "packed")
    monkeypatch.setattr(shipped, "weights_folder", lambda name: tmp_path / "packed")
    again = gare.GARE.from_pretrained("gare-mini")
    for (name, ours), theirs in zip(again.state_dict().items(), other.state_dict().values(), strict=True):
        if theirs.ndim < 2:
            assert torch.equal(ours, theirs), name
        elif not (name.startswith("encoder.text.") and theirs.ndim == 2):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)
        else:
            largest = theirs.abs().amax(dim=1)
            moved = (ours - theirs).abs().amax(dim=1)
            assert (moved <= 0.51 * largest / 127 + 1e-3 * largest).all(), name


def test_libraries_of_an_earlier_file_with_the_same_vectors_open(
    model: gare.GARE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = replace(model_stamp(model, "gare-mini"), fingerprint="1" * 32)
    open_store(str(tmp_path), stamp=stamp, create=True).close()
    with pytest.raises(LibraryError):
        gare.Library.open(tmp_path, model=model)
    monkeypatch.setitem(shipped.FORMER_FINGERPRINTS, model.fingerprint(), ("1" * 32,))
    gare.Library.open(tmp_path, model=model).close()
    with gare.Library.open(tmp_path) as library:
        assert library.model.fingerprint() == model.fingerprint()


@pytest.mark.parametrize("former", shipped.REPLACED["gare-mini"])
def test_libraries_of_the_gare_mini_it_replaced_say_what_to_do(
    model: gare.GARE, former: str, tmp_path: Path
) -> None:
    stamp = replace(model_stamp(model, "gare-mini"), fingerprint=former)
    place = tmp_path / "library"
    open_store(str(place), stamp=stamp, create=True).close()
    with (
        gare.Library.open(place) as library,
        pytest.raises(LibraryError, match="a better one has replaced") as told,
    ):
        _ = library.model
    command = shlex.split(str(told.value).partition("Encode it again: gare ")[2])
    assert command[:2] == ["index", "--library"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert "searches must wait until all is done" in done.output
    with gare.Library.open(place) as library:
        assert library.model.fingerprint() == model.fingerprint()
    other = replace(stamp, fingerprint="0" * 32)
    open_store(str(tmp_path / "other"), stamp=other, create=True).close()
    with gare.Library.open(tmp_path / "other") as library, pytest.raises(LibraryError, match="have changed"):
        _ = library.model


def test_it_goes_on_from_a_folder_that_has_no_tokeniser(model: gare.GARE, tmp_path: Path) -> None:
    """The tokeniser is the package's own: a saved model may come without its copy."""
    model.save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "tokenizer")
    again = gare.GARE.from_pretrained(tmp_path)
    texts = ["two cats", "naïve café: 1,000 umbrellas"]
    torch.testing.assert_close(again.encode_text(texts).text_TD, model.encode_text(texts).text_TD)


def test_a_damaged_tokeniser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gare.encoders.mini_encoder.OWN_TOKENIZER_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="install gare again"):
        gare.GARE.from_pretrained("gare-mini").encode_text(["a dog"])


def test_a_copy_with_another_fit_is_another_model(
    model: gare.GARE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of docs/models/gare-mini.md that makes one."""
    page = Path(__file__).parents[2] / "docs/models/gare-mini.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    tiled = gare.GARE.from_pretrained("mini-tiles")
    assert tiled.fingerprint() != model.fingerprint()
    wide, square = Image.effect_noise((320, 180), 90), Image.effect_noise((180, 180), 90)
    for picture, is_same in ((wide, False), (square, True)):
        ours, theirs = (each.encode(picture.convert("RGB")) for each in (tiled, model))
        assert np.allclose(ours, theirs, atol=1e-3) == is_same
