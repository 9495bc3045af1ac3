"""experiments/average.py: runs from one start, and a GARE with the baseline it began from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from gare import GARE, GareConfig
from warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "average.py"
TINY = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}}


def save(folder: Path, seed: int, **settings) -> GARE:
    torch.manual_seed(seed)
    model = GARE(GareConfig.load({**TINY, **settings})).eval()
    model.save_pretrained(folder)
    return model


def average(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([str(SCRIPT), *arguments])


def test_weights_lie_between_those_of_the_runs(tmp_path):
    first, second = save(tmp_path / "a", 0), save(tmp_path / "b", 1)
    done = average(f"{tmp_path}/a=0.75", f"{tmp_path}/b=0.25", "--out", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    other = second.state_dict()
    between = GARE.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(between[name], 0.75 * tensor + 0.25 * other[name])


def test_a_baseline_is_a_gare_whose_increments_are_zero(tmp_path):
    gare, baseline = save(tmp_path / "gare", 0), save(tmp_path / "base", 0, interaction={"name": "mean"})
    with torch.no_grad():
        baseline.encoder.words.weight.copy_(gare.encoder.words.weight)
    baseline.save_pretrained(tmp_path / "base")
    done = average(f"{tmp_path}/gare=0.2", f"{tmp_path}/base=0.8", "--out", f"{tmp_path}/out")
    assert done.returncode == 0, done.stderr
    own, between = gare.state_dict(), GARE.from_pretrained(tmp_path / "out").state_dict()
    assert torch.equal(between["encoder.words.weight"], own["encoder.words.weight"])  # equal in both
    torch.testing.assert_close(
        between["interaction.increment_net.query.weight"], own["interaction.increment_net.query.weight"]
    )
    torch.testing.assert_close(
        between["interaction.increment_net.output.weight"],
        0.2 * own["interaction.increment_net.output.weight"],
    )


@pytest.mark.parametrize("share", ["0.5", "1.5"])
def test_shares_that_do_not_sum_to_one_are_refused(tmp_path, share):
    save(tmp_path / "a", 0)
    done = average(f"{tmp_path}/a={share}", "--out", f"{tmp_path}/out")
    assert done.returncode
    assert "not 1" in done.stderr
    assert not (tmp_path / "out").exists()
