"""Pack data, code and a start for a machine that takes a few dozen megabytes at a time.

    python experiments/travel.py --data ../shared/data --annotations ../shared/annotations --out travel

makes travel/1, travel/2, …, each under --most megabytes. There, `cp -r travel/N/. HOME` for every one builds
HOME/data (manifests beside their frames), HOME/src, recipes and experiments (as committed) and HOME/init (the
towers, in half precision, because their packages are not there): everything that

    PYTHONPATH=HOME/src python -m gare train gare_mini_stage1 --set init_from=HOME/init …

needs (docs/models/gare-mini.md). Models of earlier runs come along in half precision: --models runs/first …
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from gare import GARE, GareConfig
from gare.data.datasets import READERS
from gare.data.manifest import Manifest

SETS = {  # folder: reader, folder of annotations
    "coco": ("coco_captions", "coco", None),
    "flickr8k": ("flickr8k", "flickr8k", None),
    "msrvtt_frames": ("msrvtt_frames", "msrvtt-frames", "msrvtt"),
}
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=float, default=60.0, help="megabytes a piece")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="saved models, as runs/first")
    chosen = parser.parse_args()
    if any(model.is_absolute() or ".." in model.parts for model in chosen.models):
        parser.error("--models takes folders below this one: they have the same path there")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        for name, (folder, reader, annotations) in SETS.items():
            source = chosen.data / folder
            described = chosen.annotations / annotations if annotations else source
            manifest = READERS[reader](described, videos=source)
            (home / "data" / name).mkdir(parents=True)
            Manifest(replace(manifest.header, root="."), manifest.rows).save(
                home / "data" / name / "manifest.csv"
            )
            for archive in source.glob("*.tar"):
                (home / "data" / name / archive.name).symlink_to(archive.resolve())
        archived = subprocess.run(
            ["git", "archive", "HEAD", "src", "recipes", "experiments"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x", "-C", str(home)], input=archived.stdout, check=True)
        shutil.rmtree(home / "src/gare/model/weights")
        # The projections are made anew for any width; 8 keeps what travels small.
        start = GARE(
            GareConfig.load({"backbone": {"family": "mini", "dim": 8}, "increment": {"enabled": False}})
        )
        start.half().save_pretrained(home / "init")
        for model in chosen.models:
            GARE.from_pretrained(model).half().save_pretrained(home / model)
        pack(home, chosen.out, int(chosen.most * 1e6))


def pack(home: Path, out: Path, most: int) -> None:
    """Largest first, each into the first piece that has room."""
    files = sorted(
        (path for path in home.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size
    )
    pieces: list[int] = []
    for path in files:
        size = path.stat().st_size
        number = next((place for place, used in enumerate(pieces) if used + size <= most), len(pieces))
        if number == len(pieces):
            pieces.append(0)
        pieces[number] += size
        target = out / str(number + 1) / path.relative_to(home)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for number, used in enumerate(pieces, start=1):
        print(f"{out}/{number}: {used / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
