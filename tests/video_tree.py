"""A folder as people have them: nested, oddly named, with copies, and with files that are no videos."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from clips import set_rotation, steady, write_audio, write_video

LONG_NAME = "ü" * 120 + "-long.mp4"  # 249 bytes
GOOD = 34
"""Videos that can be indexed, copies and all."""
COPIES = 3
FAILURES = {
    "broken/zero.mp4": "zero_length",
    "broken/truncated.mp4": "truncated",
    "broken/corrupt.mp4": "unreadable",
    "broken/text.mp4": "unreadable",
    "broken/audio only.mp4": "no_video",
    "broken/playlist.mp4": "unreadable",
    "broken/nowhere.mp4": "missing",
    "broken/caf\\xe9.mp4": "bad_name",
}


def build_tree(root: Path) -> Path:
    """Small videos that all differ, and what else lies around; symlinks that go in circles."""
    root.mkdir(parents=True)
    for number in range(20):
        folder = root / f"year {2000 + number % 4}" / f"{number % 3:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_video(
            folder / f"clip{number:02d}.mp4", steady(1 + number / 5), size=(64, 48 + 2 * (number % 2))
        )
    odd = root / "Ünïcödé 日本語" / "emoji 🎬"
    odd.mkdir(parents=True)
    write_video(odd / "père noël.mkv", steady(2.5))
    write_video(odd / LONG_NAME, steady(2.7))
    write_video(odd / 'quote\'s "and" [brackets] %_*.mp4', steady(2.9))
    write_video(odd / "new\nline.mp4", steady(3.1))
    write_video(root / "web.webm", steady(1.5), codec="libvpx-vp9")
    write_video(root / "old.avi", steady(1.5), codec="mpeg4")
    write_video(root / "UPPER.MP4", steady(1.9))
    write_video(root / "stream.ts", steady(2.0))
    write_video(root / "one frame.mp4", [0.0])
    set_rotation(write_video(root / "rotated.mov", steady(1.7)))
    shutil.move(write_video(root / "tmp.mp4", steady(2.1)), root / "no suffix")
    shutil.copy(root / "web.webm", root / "copy of web.webm")
    shutil.copy(root / "old.avi", odd / "another name.avi")
    os.link(root / "UPPER.MP4", root / "hard link.mp4")
    _add_broken(root / "broken", root / "web.webm")
    _add_ignored(root)
    return root


def _add_broken(folder: Path, good: Path) -> None:
    folder.mkdir()
    whole = write_video(folder / "truncated.mp4", steady(3)).read_bytes()
    (folder / "truncated.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "zero.mp4").touch()
    (folder / "corrupt.mp4").write_bytes(bytes(range(256)) * 40)
    (folder / "text.mp4").write_text("hello")
    write_audio(folder / "audio only.mp4")
    (folder / "playlist.mp4").write_text(f"ffconcat version 1.0\nfile '{good}'\n")
    (folder / "nowhere.mp4").symlink_to("not there.mp4")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.mp4")).write_bytes(good.read_bytes())


def _add_ignored(root: Path) -> None:
    hidden = root / ".hidden"
    hidden.mkdir()
    shutil.copy(root / "old.avi", hidden / "secret.avi")
    shutil.copy(root / "old.avi", root / ".trash.avi")
    (root / "notes.txt").write_text("no video")
    (root / "program.ts").write_text("export const x = 1;")
    (root / "README").write_text("no video either")
    (root / "loop").symlink_to(root)
    (root / "year 2000" / "up").symlink_to("..")
    (root / "alias.mp4").symlink_to("UPPER.MP4")
