"""What a disk may hold after the power went: made from the trace of `write_shim.py`.

A write is safe once its file was flushed, a name once its folder was. Of everything else a part may be there:

| policy | names that were not flushed | data that was not flushed |
| --- | --- | --- |
| lost | none is there | none is there |
| names | all | none: files are empty, or as they were |
| torn | all | the first half of every write |
| zeros | all | zeros, in the full length |
| mixed N | of every folder the first few changes | of every file none, all, half, zeros or the second half |

In one folder changes of names keep their order, as journals do. Folders and files are independent.

    python tests/power_cut.py --scene index --stride 5

`make crash` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from write_shim import Write, read_trace

_numbers = itertools.count()
POLICIES = ("lost", "names", "torn", "zeros", "mixed 1", "mixed 2", "mixed 3")


@dataclass(eq=False)
class File:
    """An inode: what is in memory, and what is surely on the disk."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that were written since the last flush."""
    born: int = field(default_factory=lambda: next(_numbers))
    """Which was made first; names cannot tell, because Lance draws them by lot."""

    def write(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self.now), offset))
        self.now[offset : offset + len(data)] = data
        self.pending.append((offset, offset + len(data)))

    def resize(self, size: int) -> None:
        self.now[size:] = b"\0" * (size - len(self.now))

    def flush(self) -> None:
        self.safe, self.pending = bytes(self.now), []

    def after_cut(self, what: str) -> bytes:
        if what == "all" or bytes(self.now) == self.safe:
            return bytes(self.now)
        if what == "none":
            return self.safe
        found = bytearray(self.now)
        for start, end in self.pending:
            middle = (start + end) // 2
            first, last = {"half": (middle, end), "zeros": (start, end), "second half": (start, middle)}[what]
            kept = self.safe[first:last]  # what was there before shows through
            found[first:last] = kept + b"\0" * (last - first - len(kept))
        if what == "half" and self.pending and self.pending[-1][1] == len(found):
            start, end = self.pending[-1]
            del found[max(len(self.safe), (start + end) // 2) :]
        return bytes(found)


Change = tuple[str, "File | Folder | None"]
"""A name, and what it stands for from now on."""


@dataclass(eq=False)
class Folder:
    """A folder: its names in memory, those on the disk, and the changes in between."""

    now: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[list[Change]] = field(default_factory=list)
    """Each happens as a whole or not at all."""
    born: int = field(default_factory=lambda: next(_numbers))

    def change(self, *changes: Change) -> None:
        _apply(self.now, changes)
        self.pending.append(list(changes))

    def flush(self) -> None:
        self.safe, self.pending = dict(self.now), []

    def after_cut(self, num_changes: int) -> dict[str, File | Folder]:
        found = dict(self.safe)
        for changes in self.pending[:num_changes]:
            _apply(found, changes)
        return found


def _apply(names: dict[str, File | Folder], changes: Sequence[Change]) -> None:
    for name, what in changes:
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


class Disk:
    """A folder of the disk while a trace is replayed."""

    def __init__(self, root: str, start: Path | None) -> None:
        self.root = root.rstrip("/")
        self.top = Folder()
        if start is not None and start.exists():
            self.top.now["root"] = _read(start)
            self.top.flush()

    def replay(self, write: Write) -> None:
        """One call of the trace."""
        folder, name = self._parent(write.path)
        if write.kind == "C":
            folder.change((name, File()))
        elif write.kind == "M":
            folder.change((name, Folder()))
        elif write.kind in "UD":
            folder.change((name, None))
        elif write.kind == "L":
            other, target = self._parent(write.target)
            other.change((target, folder.now[name]))
        elif write.kind in "RX":
            self._rename(folder, name, write)
        elif write.kind in "WTF":
            self._touch(write, folder.now[name])

    def _rename(self, folder: Folder, name: str, write: Write) -> None:
        other, target = self._parent(write.target)
        moved, replaced = folder.now[name], other.now.get(target)
        gone: Change = (name, replaced if write.kind == "X" else None)
        if folder is other:
            folder.change((target, moved), gone)
        else:  # a journal has both or none, but nothing here relies on that
            other.change((target, moved))
            folder.change(gone)

    def _touch(self, write: Write, what: File | Folder) -> None:
        if write.kind == "F":
            what.flush()
        elif isinstance(what, File) and write.kind == "W":
            what.write(write.number, write.data)
        elif isinstance(what, File):
            what.resize(write.number)

    def _parent(self, path: str) -> tuple[Folder, str]:
        if path == self.root:
            return self.top, "root"
        assert path.startswith(self.root + "/"), path
        *folders, name = path.removeprefix(self.root + "/").split("/")
        found = self.top.now["root"]
        for part in folders:
            assert isinstance(found, Folder)
            found = found.now[part]
        assert isinstance(found, Folder)
        return found, name

    def after_cut(self, policy: str) -> dict[str, bytes | None]:
        """The files that are left, by path; None is a folder."""
        chance = random.Random(policy)
        image: dict[str, bytes | None] = {}

        def visit(folder: Folder, place: str) -> None:
            num_changes = len(folder.pending)
            if policy == "lost":
                num_changes = 0
            elif policy.startswith("mixed") and num_changes:
                num_changes = chance.randint(0, num_changes)
            # Chance decides about what is not safe, in the order of the trace, and so the same in every run.
            for name, what in sorted(folder.after_cut(num_changes).items(), key=lambda pair: pair[1].born):
                path = f"{place}/{name}"
                if isinstance(what, Folder):
                    image[path] = None
                    visit(what, path)
                else:
                    is_safe = bytes(what.now) == what.safe
                    image[path] = what.safe if is_safe else what.after_cut(_data(policy, chance))

        visit(self.top, "")
        return {path.removeprefix("/root"): content for path, content in image.items()}


def _data(policy: str, chance: random.Random) -> str:
    fixed = {"lost": "none", "names": "none", "torn": "half", "zeros": "zeros"}
    return fixed.get(policy) or chance.choice(["none", "all", "half", "zeros", "second half"])


def _read(place: Path) -> Folder:
    folder = Folder()
    for path in sorted(place.iterdir()):
        content = path.read_bytes() if path.is_file() else b""
        folder.now[path.name] = File(bytearray(content), content) if path.is_file() else _read(path)
    folder.flush()
    return folder


@dataclass(frozen=True)
class Cut:
    """A disk after the power went."""

    number: int
    """How many calls of the trace came before it."""
    policy: str
    image: dict[str, bytes | None]
    acknowledged: tuple[str, ...]
    is_end: bool
    """The operation was done."""

    def write_to(self, target: Path) -> None:
        if self.image:
            target.mkdir(parents=True)
        for path, content in self.image.items():
            if not path:
                continue
            if content is None:
                (target / path[1:]).mkdir(parents=True, exist_ok=True)
            else:
                (target / path[1:]).write_bytes(content)


def cuts(trace: Sequence[Write], root: str, start: Path | None, *, stride: int = 1) -> Iterator[Cut]:
    """The power goes after every call; disks that are alike come once."""
    disk = Disk(root, start)
    acknowledged: list[str] = []
    seen: set[bytes] = set()
    for number, write in enumerate(trace, 1):
        if write.kind == "A":
            acknowledged.append(write.path)
        elif write.kind != "N":
            disk.replay(write)
        is_end = number == len(trace)
        if number % stride and not is_end:
            continue
        for policy in POLICIES:
            image = disk.after_cut(policy)
            mark = _digest(image, (*acknowledged, str(is_end)))
            if mark not in seen:
                seen.add(mark)
                yield Cut(number, policy, image, tuple(acknowledged), is_end)


def _digest(image: dict[str, bytes | None], words: Sequence[str]) -> bytes:
    found = hashlib.sha256(json.dumps(list(words)).encode())
    for path, content in sorted(image.items()):
        found.update(
            path.encode() + b"\0" + (b"folder" if content is None else hashlib.sha256(content).digest())
        )
    return found.digest()


# --- on demand ----------------------------------------------------------------------------------------------


class PowerCuts:
    """Cuts the power during operations on libraries, and of training.

    `library` and `training` give the number of calls, of disks, and what was wrong.
    """

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        from crash_places import FolderPlace
        from crash_scenes import learn_truth, make_clips, make_model
        from crash_server import CrashServer

        (folder / "libraries").mkdir()
        self._folder, self._place = folder, FolderPlace(folder / "libraries")
        self._server = stack.enter_context(CrashServer(make_model(folder / "model"), trains=True))
        self._clips = make_clips(folder / "clips")
        self._truth = learn_truth(self._place, self._server, self._clips)

    def library(self, name: str, *, stride: int = 1, most: int = 0) -> tuple[int, int, list[str]]:
        from crash_scenes import SCENES, check_after, set_stage

        home, wrong = self._folder / name.replace(" ", "-"), []
        stage = set_stage(SCENES[name], self._place, self._server, home, self._clips, self._truth)
        trace = list(read_trace(home / "trace"))
        found = _some(list(cuts(trace, stage.traced, Path(stage.template), stride=stride)), most)
        for cut in found:
            uri = self._place.new()
            cut.write_to(Path(uri))
            try:
                check_after(stage, uri, acknowledged=cut.acknowledged, is_done=cut.is_end, may_repair=True)
            except AssertionError as error:
                wrong.append(f"{cut.policy} after {cut.number} of {len(trace)} calls: {error}")
            self._place.remove(uri)
        return len(trace), len(found), wrong

    def training(self, name: str, *, stride: int = 1, most: int = 0) -> tuple[int, int, list[str]]:
        import crash_training

        home, wrong = self._folder / name.replace(" ", "-"), []
        stage = crash_training.set_stage(name, self._server, home)
        trace = list(read_trace(home / "trace"))
        found = _some(list(cuts(trace, stage.traced, stage.template, stride=stride)), most)
        for number, cut in enumerate(found):
            place = home / f"cut{number}"
            cut.write_to(place)
            place.mkdir(exist_ok=True)
            try:
                crash_training.check_after(stage, place, is_acknowledged=cut.is_end)
            except AssertionError as error:
                wrong.append(f"{cut.policy} after {cut.number} of {len(trace)} calls: {error}")
            shutil.rmtree(place)
        return len(trace), len(found), wrong


def _some(found: list[Cut], most: int) -> list[Cut]:
    """So many of them, spread over all; 0 is all. The last one is the end of the operation."""
    is_few = not most or len(found) <= most
    return found if is_few else [found[-1 - len(found) * number // most] for number in range(most)]


def main() -> int:
    import crash_training
    from crash_points import quick_folder
    from crash_scenes import SCENES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scene", action="append", help="an operation; default: all")
    parser.add_argument("--stride", type=int, default=1, help="cut after every so many calls")
    options = parser.parse_args()
    print("| operation | calls | disks | wrong |\n| --- | ---: | ---: | ---: |", flush=True)
    started, num_wrong = time.monotonic(), 0
    stack = ExitStack()
    cutter = PowerCuts(stack, stack.enter_context(quick_folder()))
    for name in (*SCENES, *crash_training.SCENES):
        if options.scene and name not in options.scene:
            continue
        attempt = cutter.library if name in SCENES else cutter.training
        num_calls, num_cuts, wrong = attempt(name, stride=options.stride)
        for line in wrong:
            print(f"{name}: {line[:200]} … {line[-600:]}", file=sys.stderr, flush=True)
        num_wrong += len(wrong)
        print(f"| {name} | {num_calls:,} | {num_cuts:,} | {len(wrong):,} |", flush=True)
    stack.close()
    print(f"{time.monotonic() - started:,.0f} s", file=sys.stderr)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
