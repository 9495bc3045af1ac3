"""Average the weights of runs that began from the same towers: a "model soup".

    python experiments/average.py runs/stage1/best=0.7 runs/light/best=0.3 --out runs/average \
        --set encoder.image_size=224 --set encoder.max_words=32

Runs with other augmentation and other shares of the sets end in other places, and the place between them
generalises better than either: docs/models/gare-mini.md has the numbers. Weights are chosen on val.
A baseline may be averaged with a GARE that began from it: name the GARE first, its configuration is kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gare import GARE, GareConfig
from gare.errors import GareError
from gare.model.model_files import TOKENIZER_FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="FOLDER=WEIGHT")
    parser.add_argument("--set", action="append", default=[], help="settings other than the first model's")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    shares = {Path(folder): float(share) for folder, share in (text.rsplit("=", 1) for text in chosen.models)}
    if abs(sum(shares.values()) - 1) > 1e-6:
        parser.error(f"the weights sum to {sum(shares.values())}, not 1")
    try:
        models = [GARE.from_pretrained(folder) for folder in shares]
    except GareError as error:
        parser.error(str(error))
    tokenizer = next(iter(shares)) / TOKENIZER_FOLDER
    average = GARE(  # all of it comes from the models: the packages of the towers may be absent
        GareConfig.load(models[0].config.to_values(), chosen.set),
        pretrained_towers=False,
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
    )
    states = [model.state_dict() for model in models]
    for name, tensor in average.state_dict().items():
        pairs = zip(shares.values(), states, strict=True)
        parts = [(share, state[name]) for share, state in pairs if name in state]
        if len(parts) == len(states) and all(torch.equal(part, parts[0][1]) for _, part in parts):
            tensor.copy_(parts[0][1])  # frozen words stay what their package has, to the last bit
            continue
        # A baseline is a GARE whose psi gives zero: of what it lacks, only psi's last layer counts as zeros.
        total = (
            1.0 if name.startswith("interaction.increment_net.output.") else sum(share for share, _ in parts)
        )
        tensor.copy_(torch.stack([share / total * part for share, part in parts]).sum(dim=0))
    average.save_pretrained(chosen.out)
    print(f"saved {chosen.out}")


if __name__ == "__main__":
    main()
