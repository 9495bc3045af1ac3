"""Average the weights of runs that began from the same towers: a "model soup".

    python experiments/average.py runs/stage1/best=0.7 runs/light/best=0.3 --size 224 --out runs/average

Runs with other augmentation and other shares of the sets end in other places, and the place between them
generalises better than either: docs/models/gare-mini.md has the numbers. Weights are chosen on val.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from gare import GARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="FOLDER=WEIGHT")
    parser.add_argument("--size", type=int, required=True, help="pixels a side that the average will take")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    shares = {Path(folder): float(share) for folder, share in (text.rsplit("=", 1) for text in chosen.models)}
    if abs(sum(shares.values()) - 1) > 1e-6:
        parser.error(f"the weights sum to {sum(shares.values())}, not 1")
    models = {folder: GARE.from_pretrained(folder) for folder in shares}
    states = [(models[folder].state_dict(), share) for folder, share in shares.items()]
    first = next(iter(models.values()))
    average = {
        name: torch.stack([share * state[name] for state, share in states]).sum(dim=0)
        for name in first.state_dict()
    }
    first.load_state_dict(average)
    first.config = replace(first.config, backbone=replace(first.config.backbone, image_size=chosen.size))
    first.save_pretrained(chosen.out)
    print(f"saved {chosen.out}")


if __name__ == "__main__":
    main()
