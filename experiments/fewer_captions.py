"""A manifest that keeps only some captions of every video of a split, beside the one it is made from.

    python experiments/fewer_captions.py data/msrvtt_frames data/flickr8k --captions 1

writes captions-1.csv into both folders; `gare ablate captions` trains on them. val and test stay whole.

    python experiments/fewer_captions.py data/msrvtt_frames --captions 1 --split val

writes captions-1-val.csv, in which a validation video has one caption: for methods that take long for a pair.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from gare.data.manifest import Manifest, Split, find_manifest
from gare.errors import GareError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--captions", type=int, default=1, help="captions to keep, the first ones")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train")
    chosen = parser.parse_args()
    if chosen.captions < 1:
        parser.error("--captions must be at least 1")
    for folder in chosen.data:
        path = find_manifest(folder)
        suffix = "" if chosen.split == "train" else f"-{chosen.split}"
        out = path.with_name(f"captions-{chosen.captions}{suffix}.csv")
        try:
            fewer = keep_first(Manifest.load(path), chosen.captions, chosen.split)
        except GareError as error:
            parser.error(str(error))
        root = os.path.relpath(fewer.header.root, path.parent)  # as a manifest has it: from its own folder
        replace(fewer, header=replace(fewer.header, root=root)).save(out)
        print(out)


def keep_first(manifest: Manifest, most: int, split: Split) -> Manifest:
    seen: Counter[str] = Counter()
    rows = []
    for row in manifest.rows:
        seen[row.video_id] += row.split == split
        if seen[row.video_id] <= most:
            rows.append(row)
    fewer = Manifest(manifest.header, tuple(rows))
    expected = {each: fewer.counts[each] for each in manifest.header.expected}
    protocol = f"{manifest.header.protocol}; first {most} captions of a {split} video".lstrip("; ")
    return replace(fewer, header=replace(manifest.header, expected=expected, protocol=protocol))


if __name__ == "__main__":
    main()
