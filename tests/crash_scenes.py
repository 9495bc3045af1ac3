"""The operations that are stopped at every write: what was there before, and what is done.

Each begins with a tree of tiny videos and a library, and ends as it would without a crash. `try_point` stops
the operation once, looks at what is left, does it again and compares.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from clips import steady, write_video
from crash_places import CrashPlace
from crash_server import CrashServer, Outcome
from gare import GARE, GareConfig
from library_state import State, Truth, assert_same, check_sound, same_notes, summary
from write_shim import read_trace

COLOURS = ("red", "green", "blue", "yellow", "purple")


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}})
    GARE(config).eval().save_pretrained(folder)
    return folder


def make_clips(folder: Path) -> Path:
    """Videos of two seconds, each of one colour that gets darker."""
    folder.mkdir(parents=True)
    for colour in COLOURS:
        light, dark = Image.new("RGB", (64, 48), colour), Image.new("RGB", (64, 48), "black")
        pictures = [Image.blend(light, dark, number / 60) for number in range(20)]
        write_video(folder / f"{colour}.mp4", steady(2), pictures=pictures)
    return folder


class Tree:
    """A folder of videos, each a copy of a clip. Dates go up with every change, whatever the clock says."""

    def __init__(self, root: Path, clips: Path) -> None:
        self.root, self._clips = root, clips
        self._clock = 1_700_000_000
        root.mkdir(parents=True)

    def put(self, name: str, colour: str) -> None:
        shutil.copyfile(self._clips / f"{colour}.mp4", self.root / name)
        self.touch(name)

    def touch(self, name: str) -> None:
        self._clock += 1
        os.utime(self.root / name, (self._clock, self._clock))

    def rename(self, name: str, other: str) -> None:
        os.replace(self.root / name, self.root / other)

    def copy(self, name: str, other: str) -> None:
        shutil.copyfile(self.root / name, self.root / other)
        self.touch(other)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()


@dataclass(frozen=True)
class Scene:
    """One operation.

    Args:
        begin: fills the tree and the library.
        change: what happens to the tree before the operation.
        task: the function of `crash_tasks.py`.
    """

    name: str
    task: str
    begin: Callable[[Tree, Callable[..., Any]], None]
    change: Callable[[Tree], None] = lambda tree: None
    arguments: dict[str, Any] = field(default_factory=dict)
    is_fresh: bool = True
    """Afterwards the library is as one that was made anew."""


def _three(tree: Tree, index: Callable[..., Any]) -> None:
    for name, colour in (("a.mp4", "red"), ("b.mp4", "green"), ("c.mp4", "blue")):
        tree.put(name, colour)
    index(commit_seconds=60.0)


def _nothing(tree: Tree, index: Callable[..., Any]) -> None:
    tree.put("a.mp4", "red")
    tree.put("b.mp4", "green")


def _much(tree: Tree, index: Callable[..., Any]) -> None:
    """Several commits, and frames that nobody needs."""
    for name, colour in (("a.mp4", "red"), ("b.mp4", "green"), ("c.mp4", "blue"), ("d.mp4", "yellow")):
        tree.put(name, colour)
    index(upkeep=False)
    tree.put("b.mp4", "purple")
    tree.remove("d.mp4")
    index(upkeep=False)


def _add(tree: Tree) -> None:
    tree.put("d.mp4", "yellow")
    tree.copy("a.mp4", "e.mp4")


def _rearrange(tree: Tree) -> None:
    """One file moved and another put into its place, one replaced, one touched, one gone."""
    tree.rename("a.mp4", "moved.mp4")
    tree.put("a.mp4", "yellow")
    tree.touch("b.mp4")
    tree.remove("c.mp4")


def _touch(tree: Tree) -> None:
    tree.touch("a.mp4")
    tree.touch("b.mp4")


SCENES = {
    scene.name: scene
    for scene in (
        Scene("first index", "index", _nothing),
        Scene("index", "index", _three, _add),
        Scene("index after changes", "index", _three, _rearrange),
        Scene("tag", "index", _three, _touch, {"tags": ["seen"]}, is_fresh=False),
        Scene("switch of --split", "index", _three, arguments={"split": "window:1"}),
        Scene("delete", "delete", _three, is_fresh=False),
        Scene("maintain", "maintain", _much, arguments={"index_from": 3, "age_s": 0.0}),
    )
}


@dataclass
class Stage:
    """A scene with its library, ready to be played again and again."""

    scene: Scene
    place: CrashPlace
    server: CrashServer
    root: Path
    template: str
    before: State | None
    after: State
    truth: Truth
    arguments: dict[str, Any]
    num_writes: int
    kinds: list[str]
    """Of each write, by its number from 1."""
    traced: str
    """The library whose writes are in the trace."""

    def points(self, mode: str, stride: int = 1, offset: int = 0) -> Iterator[int]:
        """The writes to stop at; a torn write needs data."""
        for number in range(1 + offset % stride, self.num_writes + 1, stride):
            if mode != "torn" or self.kinds[number - 1] in "WS":
                yield number


def learn_truth(place: CrashPlace, server: CrashServer, clips: Path) -> Truth:
    """The vectors of every clip, under every segmentation."""
    truth = Truth()
    for split in ("moments:1", "window:1"):
        fresh = place.new()
        server.do("index", uri=fresh, root=str(clips), split=split, commit_seconds=60.0)
        truth.learn(server.do("state", uri=fresh))
        place.remove(fresh)
    return truth


def set_stage(
    scene: Scene, place: CrashPlace, server: CrashServer, folder: Path, clips: Path, truth: Truth
) -> Stage:
    """Make the library, and find out how it is to be in the end."""
    folder.mkdir(parents=True)
    tree = Tree(folder / "tree", clips)
    root = str(tree.root)
    template = place.new()

    def index(**arguments: Any) -> None:
        server.do("index", uri=template, root=root, **arguments)

    scene.begin(tree, index)
    has_library = scene.begin is not _nothing
    before = server.do("state", uri=template) if has_library else None
    scene.change(tree)
    arguments = dict(scene.arguments)
    if scene.task == "index":
        arguments["root"] = root
    if scene.task == "delete":
        assert before is not None
        arguments["ids"] = [row["id"] for row in before.files()[f"{root}/b.mp4"]]
    trace = str(folder / "trace")
    reference = place.copy(template)
    done = server.run(scene.task, place.stop(reference, 0, "count", trace), uri=reference, **arguments)
    done.get()
    after = server.do("state", uri=reference)
    check_sound(after, truth, deleted=_deleted(scene, root))
    if scene.is_fresh:
        fresh = place.new()
        server.do("index", uri=fresh, root=root, split=arguments.get("split"), commit_seconds=60.0)
        assert_same(server.do("state", uri=fresh), after)
        place.remove(fresh)
    place.remove(reference)
    kinds = [write.kind for write in read_trace(trace) if write.kind not in "FA"]
    assert len(kinds) == done.num_writes
    return Stage(
        scene,
        place,
        server,
        tree.root,
        template,
        before,
        after,
        truth,
        arguments,
        done.num_writes,
        kinds,
        reference,
    )


def _deleted(scene: Scene, root: str) -> list[str]:
    return [f"{root}/b.mp4"] if scene.task == "delete" else []


def try_point(stage: Stage, at: int, mode: str) -> Outcome:
    """Stop the operation at this write, check what is left, and do it again."""
    uri = stage.place.copy(stage.template)
    try:
        stop = stage.place.stop(uri, at, mode)
        outcome = stage.server.run(stage.scene.task, stop, uri=uri, **stage.arguments)
        assert outcome.was_killed or outcome.code == 0 or mode == "cut", outcome.error
        if outcome.code > 0:  # a connection that was cut may end in an error, but in one that says what to do
            assert outcome.is_explained, outcome.error
        stage.place.settle(uri)
        check_after(stage, uri)
        return outcome
    except AssertionError as error:
        raise AssertionError(
            f"'{stage.scene.name}' stopped {mode} write {at} of {stage.num_writes}: {error}"
        ) from error
    finally:
        stage.place.remove(uri)


def check_after(
    stage: Stage,
    uri: str,
    *,
    acknowledged: Sequence[str] = (),
    is_done: bool = False,
    may_repair: bool = False,
) -> None:
    """What holds after a crash: the library opens, each file is as before or as after.

    Args:
        acknowledged: what the store had said: its method, a blank, and paths or ids as JSON.
        is_done: the whole operation had ended.
    """
    deleted = _deleted(stage.scene, str(stage.root))
    left, again, kept = stage.server.do("recover", uri=uri, again=stage.scene.task, arguments=stage.arguments)
    if left is None:
        assert stage.before is None, "the library is gone"
        assert not acknowledged, "the library is gone, and something of it was acknowledged"
    else:
        check_sound(left, stage.truth, deleted=deleted)
        assert may_repair or not left.repairs, left.repairs
        _check_between(stage, left)
        _check_acknowledged(stage, left, acknowledged)
        if is_done:
            assert_same(left, stage.after)
    check_sound(again, stage.truth, deleted=deleted)
    assert_same(again, stage.after)
    assert same_notes(again.notes, stage.after.notes), (again.notes, stage.after.notes)
    assert_same(kept, stage.after)
    assert set(kept.frames_keys) == {row["frames_key"] for row in kept.items.values()}, "orphaned frames stay"


def _check_between(stage: Stage, left: State) -> None:
    """Every file has its items from before, or those from after."""
    states = [_by_file(state) for state in (stage.before, left, stage.after)]
    for path in set().union(*states):
        before, now, after = (state.get(path) for state in states)
        assert now in (before, after), f"{path}: {now}, neither {before} nor {after}"


def _check_acknowledged(stage: Stage, left: State, acknowledged: Sequence[str]) -> None:
    """What the store had said is done stays done."""
    now, after = _by_file(left), _by_file(stage.after)
    for line in acknowledged:
        method, _, words = line.partition(" ")
        for word in json.loads(words):
            if method == "replace_files":
                assert now.get(word) == after.get(word), f"what was written of {word} is gone"
            elif method == "delete":
                assert word not in left.items, f"{word} was deleted and is there"


def _by_file(state: State | None) -> dict[str, dict[tuple[float, float], Any]]:
    found: dict[str, dict[tuple[float, float], Any]] = {}
    if state is not None:
        for (path, start, end), facts in summary(state)[0].items():
            found.setdefault(path, {})[start, end] = facts
    return found
