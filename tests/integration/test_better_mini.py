"""experiments/better_mini.py: a stopped run is used, a student travels, and the chosen model is built."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gare import GARE, GareConfig
from gare.train.optimizers import build_optimizer
from gare.train.run_config import RunConfig
from gare.train.train_state import TrainState
from toy_data import recipe, write_dataset

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
BEST = {
    "share": 0.5,
    "size": 64,
    "bank_share": 0.5,
    "bank_temperature": 0.04,
    "pooling": "mean",
    "pooling_temperature": 3.0,
}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder with two small sets in the places of the real ones."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    monkeypatch.chdir(tmp_path)
    import better_mini

    for place in better_mini.SETS:
        Path(place).mkdir(parents=True)
        write_dataset(Path(place))
    return better_mini


def save_student(folder: Path) -> GARE:
    """gare-mini without increments, each matrix but the words a little larger."""
    own = GARE.from_pretrained("gare-mini")
    values = {**own.config.to_values(), "interaction": {"name": "mean"}}
    student = GARE(GareConfig.load(values), pretrained_towers=False).eval()
    state = {name: x for name, x in own.state_dict().items() if name in student.state_dict()}
    for name, tensor in state.items():
        if tensor.ndim > 1 and "word_embeddings" not in name:
            state[name] = 1.25 * tensor
    student.load_state_dict(state)
    student.save_pretrained(folder)
    return student


def test_a_student_travels_and_the_chosen_model_is_built(session, tmp_path):
    student = save_student(tmp_path / "runs/student/last")
    (tmp_path / "runs/choice.json").write_text(json.dumps({"best": BEST}))
    session.send_student(tmp_path / "out")
    parts = sorted((tmp_path / "out").glob("student.*"))
    assert all(part.stat().st_size < 16 * 2**20 for part in parts)
    assert len(parts) <= 3
    session.receive_student(parts, tmp_path / "back/last")
    sent, own = student.state_dict(), GARE.from_pretrained("gare-mini").state_dict()
    received = GARE.from_pretrained(tmp_path / "back/last").state_dict()
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(received[name], tensor, atol=1e-4, rtol=1e-3)
    session.build_chosen(BEST, 8, tmp_path / "runs/mini")
    built = GARE.from_pretrained(tmp_path / "runs/mini")
    assert built.config.encoder.image_size == 64
    assert built.encoder.bank is not None
    assert 0 < len(built.encoder.bank.captions_KD) <= 8
    assert built.encoder.bank.captions_KD.norm(dim=1).tolist() == pytest.approx(
        [1] * len(built.encoder.bank.captions_KD), abs=1e-4
    )
    for name, tensor in built.state_dict().items():
        if name.startswith("interaction."):
            assert torch.equal(tensor, own[name]), name
        elif name.endswith("projection.weight"):
            torch.testing.assert_close(tensor, 1.125 * own[name])
    assert not (tmp_path / "runs/mini-without-bank").exists()


def test_the_table_has_gare_mini_itself_in_it_and_its_best_row_first(session, tmp_path, monkeypatch):
    save_student(tmp_path / "runs/student/last")
    monkeypatch.setattr(session, "SHARES", (0.0, 1.0))
    monkeypatch.setattr(session, "POOLINGS", (("mean", 3.0),))
    session.choose(8, [64])
    found = json.loads((tmp_path / "runs/choice.json").read_text())
    assert found["best"] == found["rows"][0]
    assert [row["goal"] for row in found["rows"]] == sorted((r["goal"] for r in found["rows"]), reverse=True)
    assert len(found["rows"]) == 2 * (1 + 3 * 4)
    assert [row["share"] for row in found["rows"] if row["bank_share"] == 0].count(0.0) == 1


def test_a_run_that_was_stopped_gives_the_average_of_its_weights(session, tmp_path):
    config = RunConfig.load(recipe(write_dataset(tmp_path / "colours"), ema_decay=0.9))
    torch.manual_seed(0)
    model = GARE(config.model)
    state = TrainState(model, build_optimizer(model, config.optimizer), ema_decay=config.ema_decay)
    run = tmp_path / "runs/late"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config.to_toml())
    state.average = {name: torch.full_like(x, 0.5) for name, x in model.state_dict().items()}
    state.save(run / "checkpoints")
    found = GARE.from_pretrained(session.trained(run)).state_dict()
    assert all((tensor == 0.5).all() for tensor in found.values())
