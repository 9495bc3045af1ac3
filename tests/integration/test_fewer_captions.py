"""experiments/fewer_captions.py: videos of one split keep some captions, the other splits all of theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gare.data.loader import FrameSource
from gare.data.manifest import Manifest
from toy_data import write_dataset
from warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "fewer_captions.py"


@pytest.mark.parametrize(("split", "name"), [("train", "captions-1.csv"), ("val", "captions-1-val.csv")])
def test_first_captions_of_the_videos_of_a_split_are_kept(tmp_path, split, name):
    manifest = write_dataset(tmp_path)
    once = Manifest.load(manifest)
    again = [replace(row, caption=f"{row.caption} again") for row in once.rows if row.split == split]
    twice = Manifest(once.header, (*once.rows, *again))
    replace(twice, header=replace(once.header, expected=twice.counts)).save(manifest)
    run_python(
        [str(SCRIPT), tmp_path.name, "--captions", "1", "--split", split], cwd=tmp_path.parent
    ).check_returncode()
    whole = FrameSource.open(manifest, 3).manifest
    fewer = FrameSource.open(manifest.with_name(name), 3).manifest
    assert len(whole.captions(split)) == 2 * len(fewer.captions(split))
    assert fewer.videos(split) == whole.videos(split)
    assert fewer.header.root == whole.header.root
    assert not any(caption.endswith("again") for caption in fewer.captions(split))
    for other in {"train", "val", "test"} - {split}:
        assert fewer.captions(other) == whole.captions(other)
