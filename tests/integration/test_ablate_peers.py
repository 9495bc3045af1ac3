"""`gare ablate peers`: every published method trained and compared by one command, at a tiny size."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from gare.interaction import INTERACTIONS
from gare.interaction.peers import PEERS
from gare.train import RunConfig
from gare.train.ablation import Ablation
from toy_data import recipe, write_dataset
from warm import run_gare as run

TABLE = Path(__file__).resolve().parents[2] / "recipes" / "ablations" / "peers.toml"


def test_every_method_has_a_row_with_the_losses_of_its_paper():
    base = recipe(Path("manifest.csv"))
    found = {}
    for row in Ablation.load(TABLE).rows:
        config = RunConfig.load(base, row.set)
        name = config.model.interaction.name
        found[name] = config
        terms = config.objective.terms
        for term, values in INTERACTIONS[name].published_terms.items():
            if name != "gare":
                assert {key: getattr(terms[term], key) for key in values} == dict(values), (name, term)
    assert set(found) == set(INTERACTIONS) >= set(PEERS)


def test_the_command_trains_and_compares_all_of_them(tmp_path):
    manifest = write_dataset(tmp_path / "data")
    values = recipe(manifest, epochs=1, batch_size=8)
    values["model"]["encoder"] = {"name": "tiny"}
    (tmp_path / "recipe.toml").write_text(RunConfig.load(values).to_toml())
    done = run(
        "ablate", "peers", "--recipe", tmp_path / "recipe.toml", "--out", tmp_path / "out",
        "--device", "cpu", "--seeds", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = tomllib.loads(TABLE.read_text())["rows"]
    numbers = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [row["name"] for row in numbers["rows"]] == [row["name"] for row in rows]
    for row in numbers["rows"]:
        costs = row["costs"]
        assert costs["flops_per_pair"] > 0
        assert costs["milliseconds"] > 0
        assert costs["fast_scoring"] in ("vectors", "products", "none")
        assert 0 <= row["text_to_video"]["recall_at_1"]["mean"] <= 1
    by_name = {row["name"]: row["costs"] for row in numbers["rows"]}
    assert by_name["mean pooling"]["fast_scoring"] == "vectors"
    assert by_name["CLIP4Clip, tight"]["fast_scoring"] == "none"
    assert by_name["CLIP4Clip, tight"]["flops_per_pair"] > by_name["CLIP4Clip, mean"]["flops_per_pair"]
    assert "exact fast scoring" in done.stdout
    assert (tmp_path / "out" / "table.md").read_text().strip() == done.stdout.strip()
