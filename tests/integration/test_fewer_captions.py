"""experiments/fewer_captions.py: training videos keep some captions, the other splits all of theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gare.data.loader import FrameSource
from gare.data.manifest import Manifest
from toy_data import write_dataset
from warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "fewer_captions.py"


def test_first_captions_of_training_videos_are_kept(tmp_path):
    manifest = write_dataset(tmp_path)
    once = Manifest.load(manifest)
    again = [replace(row, caption=f"{row.caption} again") for row in once.rows if row.split == "train"]
    twice = Manifest(once.header, (*once.rows, *again))
    replace(twice, header=replace(once.header, expected=twice.counts)).save(manifest)
    run_python([str(SCRIPT), tmp_path.name, "--captions", "1"], cwd=tmp_path.parent).check_returncode()
    whole = FrameSource.open(manifest, 3).manifest
    fewer = FrameSource.open(manifest.with_name("captions-1.csv"), 3).manifest
    assert len(whole.captions("train")) == 2 * len(fewer.captions("train"))
    assert fewer.videos("train") == whole.videos("train")
    assert fewer.header.root == whole.header.root
    assert not any(caption.endswith("again") for caption in fewer.captions("train"))
    for split in ("val", "test"):
        assert fewer.captions(split) == whole.captions(split)
