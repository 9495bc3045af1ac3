"""docs/how-to/train-on-your-videos.md, from a CSV and ten real videos to a model that finds them."""

from __future__ import annotations

import colorsys
from pathlib import Path

import av
from PIL import Image

from gare import GARE
from warm import run_gare

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["red", "orange", "yellow", "lime", "green", "cyan", "azure", "blue", "violet", "pink"]


def run(*arguments: object, cwd: Path) -> str:
    result = run_gare(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def write_clip(path: Path, colour: tuple[int, int, int]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(12):
            container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (96, 64), colour))))
        container.mux(stream.encode(None))


def test_ten_videos_and_a_csv(tmp_path):
    (tmp_path / "videos").mkdir()
    lines = ["video,caption"]
    for number, word in enumerate(WORDS):
        red, green, blue = (int(255 * x) for x in colorsys.hsv_to_rgb(number / 10, 1, 1))
        write_clip(tmp_path / "videos" / f"{word}.mp4", (red, green, blue))
        lines.append(f"{word}.mp4,everything is {word}")
    (tmp_path / "captions.csv").write_text("\n".join(lines) + "\n")
    run(
        "data",
        "prepare",
        "csv",
        "--annotations",
        "captions.csv",
        "--videos",
        "videos",
        "--out",
        "prepared",
        cwd=tmp_path,
    )
    recipe = ROOT / "recipes/own_csv.toml"
    out = run(
        "train",
        recipe,
        "--out",
        "runs/mine",
        "--set",
        "data.manifest=prepared",
        "--set",
        "data.num_frames=4",
        cwd=tmp_path,
    )
    assert out.strip() == "runs/mine/best"
    run("evaluate", "runs/mine/best", "--data", "prepared", "--split", "train", "--frames", 4, cwd=tmp_path)
    model = GARE.from_pretrained(tmp_path / "runs/mine/best")
    text = model.encode_text([f"everything is {word}" for word in WORDS])
    video = model.encode_video([str(tmp_path / "videos" / f"{word}.mp4") for word in WORDS], num_frames=4)
    best = model.score(text, video).argmax(dim=1).tolist()
    assert sum(found == wanted for wanted, found in enumerate(best)) >= 7
