"""A small real dataset: folders of PNG frames with captions, and a recipe that learns it in seconds."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from PIL import Image

from gare.data.manifest import Header, Manifest, Row

COLOURS = ["red", "orange", "yellow", "lime", "teal", "azure", "purple", "pink"]


def write_dataset(folder: Path, *, videos: int = 8) -> Path:
    """Each video is a colour that fades; train, val and test show the same eight, captions differ."""
    rows = []
    for number in range(videos):
        hue = number / videos
        for frame in range(3):
            red, green, blue = colorsys.hsv_to_rgb(hue, 1.0, 1.0 - 0.2 * frame)
            path = folder / f"video{number}" / f"{frame}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 36), (int(255 * red), int(255 * green), int(255 * blue))).save(path)
        colour = COLOURS[number % len(COLOURS)] + "ish" * (number // len(COLOURS))
        for split, text in (
            ("train", f"{colour} light"),
            ("val", f"{colour} light fades"),
            ("test", f"{colour} light"),
        ):
            rows.append(Row(f"video{number}-{split}", f"video{number}", text, split))
    Manifest(Header("colours"), tuple(rows)).save(folder / "manifest.csv")
    return folder / "manifest.csv"


def recipe(manifest: Path, **changes: Any) -> dict[str, Any]:
    return {
        "selection_split": "val",
        "epochs": 3,
        "batch_size": 4,
        "log_every": 1,
        "checkpoint_every": 1,
        "data": {"manifest": str(manifest), "num_frames": 3},
        "model": {
            "encoder": {"name": "tiny"},
            "temporal": {"num_layers": 1},
            "interaction": {"pooling": "text_conditioned"},
            "temperature": {"value": 0.05},
        },
        "optimizer": {"learning_rate": 3e-3, "image_learning_rate": 3e-3, "text_learning_rate": 3e-3},
        **changes,
    }
