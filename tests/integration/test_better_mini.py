"""experiments/better_mini.py: small runs from end to end, and the model that is built from them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from gare import GARE
from toy_data import write_dataset

TRIAL = ("run", "--plain", "--batch=8", "--steps=2", "--val-sizes=32", "--workers=1")
EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder with three small sets in the places of the real ones."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.chdir(tmp_path)
    import better_mini

    for name in better_mini.SETS:
        place = tmp_path / "data" / name
        place.mkdir(parents=True)
        write_dataset(place)
    return better_mini


def call(session: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["better_mini.py", *words])
    session.main()


def test_students_are_trained_and_half_of_them_is_built(session, tmp_path, monkeypatch, capsys):
    call(
        session,
        monkeypatch,
        *TRIAL,
    )
    shown = capsys.readouterr().out
    assert "72 pictures of 24 videos, 24 captions" in shown
    for run in ("start", "helper", "r1", "r2"):
        assert f"{run}, 32 pixels" in shown
    runs = tmp_path / "runs"
    sent = load_file(runs / "r1.safetensors")
    parts = sorted(runs.glob("r1.part*"))
    assert len(parts) == 2
    assert all(part.stat().st_size <= 16 * 2**20 for part in parts)
    call(session, monkeypatch, "receive", *map(str, reversed(parts)), "--out", "back.safetensors")
    back = load_file("back.safetensors")
    assert all(torch.equal(tensor, sent[name]) for name, tensor in back.items())

    students = [str(runs / f"{name}.safetensors") for name in ("r1", "r2")]
    call(session, monkeypatch, "build", *students, "--captions", "8", "--out", str(runs / "mini"))
    built = GARE.from_pretrained(runs / "mini")
    assert built.config.encoder.image_size == 256
    assert built.encoder.bank is not None
    own, both = GARE.from_pretrained("gare-mini").state_dict(), [load_file(path) for path in students]
    moved = 0
    for name, tensor in built.state_dict().items():
        if ".bank." in name:
            continue
        if name.startswith("encoder.") and name in both[0]:
            mean = (both[0][name].float() + both[1][name].float()) / 2
            torch.testing.assert_close(tensor, (own[name] + mean) / 2)
            moved += not torch.equal(tensor, own[name])
        else:
            assert torch.equal(tensor, own[name]), name
    assert moved > 100
    frozen = [name for name in sent if ".blocks.4." in name or "word_embeddings" in name]
    assert not frozen


def test_a_helper_that_is_there_is_read_again(session, monkeypatch, capsys):
    call(session, monkeypatch, *TRIAL, "--only", "helper")
    called = []
    monkeypatch.setattr(session, "load_file", lambda path: called.append(path) or load_file(path))
    call(session, monkeypatch, *TRIAL, "--only", "r1")
    assert called == ["runs/helper.safetensors"]


def test_a_blended_pair_has_both_captions_and_what_no_longer_fits_is_cut(session):
    ids = torch.zeros(4, session.WORDS, dtype=torch.long)
    length = torch.tensor([5, 20, 4, 20])
    for row, words in enumerate(length.tolist()):
        ids[row, :words] = torch.tensor([101, *range(100 * row + 1000, 100 * row + 998 + words), 102])
    joined, joined_length = session.join_captions(ids, length, 2)
    assert joined_length.tolist() == [5 + 4 - 2, 24, 4, 20]
    assert joined[0, :8].tolist() == [101, 1000, 1001, 1002, 1200, 1201, 102, 0]
    assert joined[1, :24].tolist() == [101, *range(1100, 1118), *range(1300, 1305)]
    assert torch.equal(joined[2:], ids[2:])


def test_a_draw_shows_the_picture_of_its_caption(session):
    """Colours are jittered, and red videos stay redder than those of seven other hues."""
    pairs = session.Pairs(Path("data"), torch.device("cpu"), None, 1)
    pairs.finish(GARE.from_pretrained("gare-mini").encoder.tokenize)
    row_B = next(pairs.rows(32, seed=0))
    once_and_twice = [row for row in range(24) for _ in range(2 if 8 <= row < 16 else 1)]
    assert sorted(row_B.tolist()) == once_and_twice != row_B.tolist()
    batch = pairs.draw(row_B, session.Look(least_area=1.0), 32, torch.Generator().manual_seed(0))
    assert batch.pixels_BCHW.shape == (32, 3, 32, 32)
    is_red_B = batch.video_B % 8 == 0
    colour_B3 = F.normalize(batch.pixels_BCHW.float().mean(dim=(2, 3)), dim=-1)
    redness_B = colour_B3[:, 0] - colour_B3[:, 1:].amax(dim=1)
    assert redness_B[is_red_B].mean() > redness_B[~is_red_B].mean() + 0.3
