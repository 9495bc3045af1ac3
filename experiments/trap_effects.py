"""What the traps of published code do to recalls, with heads that `gare ablate peers` trained.

    python experiments/trap_effects.py runs/peers --out experiments/results/traps/traps.json

A row is a trained head, evaluated as it is and with one trap on: the same weights, texts and videos. Traps
that act in training alone leave the scores as they are and have no row. A p-value is that of a two-sided
paired permutation test of R@1, and the tests are not corrected for their number.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gare import GARE, atomic
from gare.evaluate import paired_permutation_test, retrieval_metrics
from gare.evaluate.method_rescoring import assignment
from gare.evaluate.rescoring import dual_softmax
from gare.interaction import build_interaction
from gare.train import RunConfig
from gare.train.training_frames import cached_videos, open_source

NUM_PAIRS = {"emcl": 100}
"""Nine EM rounds for every pair take minutes: the first so many texts and videos."""


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "runs", type=Path, help="the folder of `gare ablate peers`, with data.frames = cached"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for best in sorted(chosen.runs.glob(f"*/seed-{chosen.seed}/best")):
        for row in effects(best):
            rows.append(row)
            print(row, flush=True)
    if not rows:
        parser.error(f"no trained method below {chosen.runs}: run gare ablate peers first")
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(chosen.out, json.dumps(rows, indent=1) + "\n")


def effects(best: Path) -> list[dict[str, Any]]:
    """Each trap of a trained method that changes its scores; the rescorings, for mean pooling."""
    model = GARE.from_pretrained(best).eval()
    config = RunConfig.load(best.parent / "config.toml")
    source = open_source(config.data)
    texts = model.encode_text(source.manifest.captions("test"))
    settings = model.interaction.config
    number = NUM_PAIRS.get(settings.name, len(texts))
    texts = texts[:number]

    def scores() -> Tensor:
        """Where padding takes part, its vectors are those of pictures that are zero."""
        videos = cached_videos(model, source, config.data, "test")
        assert videos is not None, "data.frames is not cached"
        return model.score(texts, videos[:number])

    off_TV, trained = scores(), model.interaction
    rows = []
    if settings.name == "mean":
        rows.append(
            effect("any method", "Hungarian assignment (ProST prints it)", off_TV, assignment(off_TV))
        )
        rows.append(effect("any method", "dual softmax, over texts", off_TV, dual_softmax(off_TV)))
    for trap in type(settings).TRAPS:
        if getattr(settings, trap):
            continue  # a row that was trained with it
        torch.manual_seed(0)
        model.interaction = build_interaction(replace(settings, **{trap: True}), model.dim).eval()
        model.interaction.load_state_dict(trained.state_dict(), strict=False)
        on_TV = scores()
        if not torch.equal(on_TV, off_TV):
            rows.append(effect(best.parent.parent.name, trap, off_TV, on_TV))
    return rows


def effect(method: str, trap: str, off_TV: Tensor, on_TV: Tensor) -> dict[str, Any]:
    """R@1 of both directions without and with the trap."""
    row: dict[str, Any] = {"method": method, "trap": trap, "texts": len(off_TV), "videos": off_TV.shape[1]}
    for way, off, on in (("text_to_video", off_TV, on_TV), ("video_to_text", off_TV.mT, on_TV.mT)):
        found = [retrieval_metrics(scores) for scores in (off, on)]
        p_value = paired_permutation_test(found[0].ranks, found[1].ranks)["recall_at_1"].p_value
        row[way] = {
            "off": round(100 * found[0].recall_at_1, 1),
            "on": round(100 * found[1].recall_at_1, 1),
            "p_value": round(p_value, 4),
        }
    return row


if __name__ == "__main__":
    main()
