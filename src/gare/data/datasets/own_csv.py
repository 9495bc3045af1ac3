"""Your own captions: a CSV of two columns, `video,caption`, and a third, `split`, if you like."""

from __future__ import annotations

from pathlib import Path

from gare.data.annotation_files import Problems, read_csv
from gare.data.manifest import SPLITS, Header, Manifest, Row
from gare.errors import DataError


def read(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """Every line is one caption; a video with several captions has several lines.

    Args:
        annotations: the CSV file.
        videos: the folder that `video` names start from; the folder of the CSV if not given.
    """
    if annotations.is_dir():
        raise DataError(f"{annotations} is a folder; give the CSV file with the columns video,caption")
    if videos is not None and not videos.is_dir():
        raise DataError(f"{videos} is not a folder; give the folder that holds the videos")
    problems = Problems(annotations)
    first_line: dict[tuple[str, str], int] = {}
    rows = []
    for line, row in read_csv(annotations, ["video", "caption"], ["split"]):
        split = next((split for split in SPLITS if split == (row.get("split") or "train")), None)
        same = first_line.setdefault((row["video"], row["caption"]), line)
        if split is None:
            problems.add(line, f"split '{row['split']}' is not one of {', '.join(SPLITS)}")
        elif not row["video"]:
            problems.add(line, "empty video; write the name of the file")
        elif not row["caption"]:
            problems.add(line, f"empty caption for {row['video']}; write one or delete the line")
        elif same != line:
            problems.add(line, f"the same video and caption as line {same}; delete one of the two")
        else:
            rows.append(Row(row["video"], row["video"], row["caption"], split))
    problems.raise_if_any()
    if not rows:
        raise DataError(f"{annotations} has no captions; write one line per caption: clip.mp4,a dog runs")
    header = Header(annotations.stem, "own captions", root=str((videos or annotations.parent).resolve()))
    manifest = Manifest(header, tuple(rows))
    # What the file holds now is what it must hold later: rows that vanish are noticed.
    return Manifest(Header(header.name, header.protocol, manifest.counts, header.root), manifest.rows)
