"""gare-mini once more, on a GPU that is lent for minutes: teachers, a student, and the choice on val.

    python experiments/better_mini.py run --by 340 680     # all of it, in a folder with data/ and recipes/
    python experiments/better_mini.py send --out OUT       # what comes back: at most five files below 16 MiB
    python experiments/better_mini.py receive OUT/student.* --out runs/student/last           # at home
    python experiments/better_mini.py build OUT/choice.json --out runs/mini                   # at home

`run` does what is missing, so it can be started again: two teachers at once from the packaged towers; a bank
of captions for each of them and for gare-mini; a student of the three, started at gare-mini; a table of
mixtures on val. A run that is not done by its time is stopped and used as it is. Start it with setsid: it
goes on between calls. docs/models/gare-mini.md has the commands of a whole session.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fill_caption_bank import copy_of, training_samples, with_bank
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gare import GARE, GareConfig, retrieval_metrics
from gare.data.loader import FrameSource, VideoBatch, load_gallery
from gare.encoders.caption_bank import CaptionBank, least_used_dimension
from gare.interaction import build_interaction
from gare.train.run_config import RunConfig
from gare.train.train_state import POINTER, has_checkpoint
from gare.train.training_run import CHECKPOINTS, CONFIG_FILE, LAST
from gare.types import TextFeatures, VideoFeatures

MINI = "gare-mini"
SETS = ("data/msrvtt_frames", "data/flickr8k")
"""What the goals are about, and where a bank takes its captions: with COCO's it lost on val."""
RECIPES = Path("recipes")
TEACHERS: dict[str, list[str]] = {
    "strong": [
        "epochs=6",  # 1,260 steps
        "evaluate_every=6",
        "ema_decay=0.996",
        "seed=3",
        "data.frames.mixed_share=0.25",
        "data.frames.word_dropout=0.1",
        "data.frames.word_swaps=0.1",
        "model.encoder.stochastic_depth=0.1",
    ],
    "light": [  # the weakest teacher of the first student, and the one that gave most
        "epochs=20",  # 620 steps
        "evaluate_every=20",
        "ema_decay=0.995",
        "seed=4",
        "data.frames.augmentation=light",
        "data.caption_choice=one_per_video",
        'data.also_train=["data/flickr8k", "data/coco"]',
        "model.encoder.dropout=0",
    ],
}
STUDENT = [
    f"init_from={MINI}",
    "epochs=7",  # 1,470 steps
    "evaluate_every=7",
    "seed=5",
    "data.frames.word_dropout=0.05",
    "data.frames.word_swaps=0.05",
]
SHARES = (0.0, 0.3, 0.5, 0.7, 1.0)
"""How much of the student's towers; the rest, and all of psi, is gare-mini's."""
BANK_SHARES, BANK_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 0.9), (0.03, 0.04, 0.05)
POOLINGS = (("mean", 3.0), ("text_conditioned", 24.0), ("text_conditioned", 40.0))
PART_BYTES = 15_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="everything that needs the GPU")
    run.add_argument(
        "--by", type=float, nargs=2, default=(340, 680), help="teachers', student's end; seconds"
    )
    run.add_argument("--set", action="append", default=[], help="for every run, as in gare train")
    run.add_argument("--captions", type=int, default=5000, help="in a bank")
    run.add_argument("--sizes", type=int, nargs="+", default=[224, 240], help="of pictures, on val")
    send = verbs.add_parser("send", help="the student's weights in half precision, cut up, and the choice")
    send.add_argument("--out", type=Path, required=True)
    receive = verbs.add_parser("receive", help="put the student together again")
    receive.add_argument("parts", type=Path, nargs="+")
    receive.add_argument("--out", type=Path, required=True)
    build = verbs.add_parser("build", help="the chosen model from its parts; then pack it")
    build.add_argument("choice", type=Path)
    build.add_argument("--captions", type=int, default=5000)
    build.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.verb == "run":
        train_all(chosen.by, chosen.set, chosen.captions)
        choose(chosen.captions, chosen.sizes)
    elif chosen.verb == "send":
        send_student(chosen.out)
    elif chosen.verb == "receive":
        receive_student(chosen.parts, chosen.out)
    else:
        build_chosen(json.loads(chosen.choice.read_text())["best"], chosen.captions, chosen.out)


# --- training -----------------------------------------------------------------------------------------------


def train_all(ends: Sequence[float], settings: Sequence[str], num_captions: int) -> None:
    """Teachers side by side, their banks, then the student."""
    started = time.monotonic()
    run_together(
        {name: ("gare_mini_stage1", own) for name, own in TEACHERS.items()}, settings, started + ends[0]
    )
    student = RunConfig.load(RECIPES / "gare_mini_student.toml", list(settings))
    size = f"encoder.image_size={student.model.encoder.to_values()['image_size']}"
    sources = {"mini": MINI, **{name: str(trained(Path("runs") / name)) for name in TEACHERS}}
    for name, source in sources.items():
        place = Path("runs/teachers") / name
        if not place.is_dir():
            wanted = [size, "encoder.dropout=0", "encoder.max_words=32"]
            with_bank(source, [Path(each) for each in SETS], num_captions, wanted).save_pretrained(place)
    say("teachers have their banks", started)
    teachers = json.dumps([f"runs/teachers/{name}" for name in sources])
    run_together(
        {"student": ("gare_mini_student", [*STUDENT, f"teachers={teachers}"])}, settings, started + ends[1]
    )
    say("the student is done", started)


def run_together(runs: dict[str, tuple[str, list[str]]], settings: Sequence[str], end: float) -> None:
    """Start what is not finished, wait, and stop what is late: its checkpoint is used."""
    started = {}
    for name, (recipe, own) in runs.items():
        folder = Path("runs") / name
        if (folder / LAST).is_dir():
            continue
        command = [
            sys.executable,
            "-m",
            "gare",
            "train",
            str(RECIPES / f"{recipe}.toml"),
            "--out",
            str(folder),
        ]
        command += [part for each in (*own, *settings) for part in ("--set", each)]
        command += ["--resume"] if (folder / CONFIG_FILE).is_file() else []
        Path("runs").mkdir(exist_ok=True)
        with (Path("runs") / f"{name}.log").open("ab") as log:
            started[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    for name, process in started.items():
        try:
            code = process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{name} is late and stopped", flush=True)
            stop(process)
            continue
        if code:
            tail = (Path("runs") / f"{name}.log").read_text(errors="replace")[-1500:]
            raise SystemExit(f"{name} failed:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let it write a checkpoint after its step; where it does not answer, the last one must do."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def trained(run: Path) -> Path:
    """The model of a run: its last one, or, if it was stopped, the average in its checkpoint."""
    if (run / LAST).is_dir():
        return run / LAST
    if not has_checkpoint(run / CHECKPOINTS):
        raise SystemExit(f"{run} was stopped before its first checkpoint; give it more time (--by)")
    checkpoint = run / CHECKPOINTS / (run / CHECKPOINTS / POINTER).read_text().strip()
    model = GARE(RunConfig.load(run / CONFIG_FILE).model, pretrained_towers=False)
    model.load_state_dict(load_file(checkpoint / "average.safetensors"))
    model.save_pretrained(run / "stopped")
    return run / "stopped"


def say(what: str, started: float) -> None:
    print(f"{time.monotonic() - started:.0f} s: {what}", flush=True)


# --- the choice ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A model of the table: its settings and what it has on val, in percent."""

    share: float
    size: int
    bank_share: float
    bank_temperature: float
    pooling: str
    pooling_temperature: float
    recalls: list[float]
    """R@1, R@5, R@10 of MSR-VTT, then of Flickr8k."""

    @property
    def goal(self) -> float:
        """The mean of the four recalls that have goals."""
        return (self.recalls[0] + self.recalls[2] + self.recalls[3] + self.recalls[5]) / 4


def choose(num_captions: int, sizes: Sequence[int]) -> None:
    """Every mixture with every bank and pooling on val; the table goes to runs/choice.json."""
    student = trained(Path("runs/student"))
    rows = [
        row for size, share in product(sizes, SHARES) for row in measure(student, share, size, num_captions)
    ]
    rows.sort(key=lambda row: -row.goal)
    values = [{**row._asdict(), "goal": row.goal} for row in rows]
    Path("runs/choice.json").write_text(json.dumps({"best": values[0], "rows": values}, indent=1) + "\n")
    for row in rows[:10]:
        print(show(row), flush=True)
    print("gare-mini as it is, at the sizes tried:")
    for row in rows:
        if row[0] == 0 and row.bank_share == 0 and row.pooling == "mean":
            print(show(row), flush=True)


def show(row: Row) -> str:
    settings = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in row[:-1])
    return f"{row.goal:.2f}  {settings}  " + " / ".join(f"{value:.1f}" for value in row.recalls)


@torch.no_grad()
def measure(student: Path, share: float, size: int, num_captions: int) -> Iterator[Row]:
    """The rows of one mixture at one size: towers run once, banks and poolings on their vectors."""
    model = mixture(student, share, [f"encoder.image_size={size}"])
    captions, pictures_ND = training_samples(model, [Path(each) for each in SETS], num_captions)
    bank_KD = model.encode_text(captions).text_TD
    dimension = least_used_dimension(bank_KD, pictures_ND)
    splits = [encode_val(model, Path(each)) for each in SETS]
    for temperature, bank_share in product(BANK_TEMPERATURES, BANK_SHARES):
        if bank_share == 0 and temperature != BANK_TEMPERATURES[0]:
            continue
        bank = CaptionBank(
            len(bank_KD), model.dim, dimension=dimension, share=bank_share, temperature=temperature
        ).to(model.device)
        bank.fill(bank_KD, pictures_ND)
        banked = [with_levels(bank if bank_share else None, *split[:2]) for split in splits]
        for pooling, pooling_temperature in POOLINGS:
            interaction = pooled(model, pooling, pooling_temperature)
            recalls: list[float] = []
            for (text, video), (_, _, video_of_text) in zip(banked, splits, strict=True):
                recalls += recalls_of(interaction.score(text, video), video_of_text)
            yield Row(share, size, bank_share, temperature, pooling, pooling_temperature, recalls)


def mixture(student: Path, share: float, settings: Sequence[str]) -> GARE:
    """gare-mini with a share of the student's towers; psi and temperature are gare-mini's."""
    model = copy_of(MINI, GARE.from_pretrained(MINI).config.to_values(), settings)
    if share:
        theirs = GARE.from_pretrained(student).state_dict()
        for name, tensor in model.state_dict().items():
            if name.startswith("encoder.") and tensor.is_floating_point():
                tensor.lerp_(theirs[name].to(tensor.device), share)
    return model


def encode_val(model: GARE, place: Path) -> tuple[TextFeatures, VideoFeatures, Tensor]:
    source = FrameSource.open(place, model.config.num_frames, "uniform")
    clips = decoded_val(source, model.encoder.image_format.size, 8 if model.device.type == "cuda" else 0)
    videos = [model.encode_frames(each.pixels_VFCHW, each.mask_VF) for each in clips]
    text = model.encode_text(source.manifest.captions("val"))
    return text, VideoFeatures.cat(videos), torch.tensor(source.manifest.video_index("val"))


_DECODED: dict[tuple[str, int], list[VideoBatch]] = {}


def decoded_val(source: FrameSource, size: int, num_workers: int) -> list[VideoBatch]:
    """The frames of val as bytes, decoded once for all mixtures."""
    key = source.manifest.header.name, size
    if key not in _DECODED:
        _DECODED[key] = list(
            load_gallery(source, "val", image_size=size, batch_size=32, num_workers=num_workers)
        )
    return _DECODED[key]


def with_levels(
    bank: CaptionBank | None, text: TextFeatures, video: VideoFeatures
) -> tuple[TextFeatures, VideoFeatures]:
    """The features that the model with this bank would give."""
    if bank is None:
        return text, video
    frames_VFD = bank.lower_pictures(video.frames_VFD).masked_fill(~video.mask_VF[..., None], 0)
    lifted = TextFeatures(bank.lift_text(text.text_TD), text.words_TWD, text.mask_TW)
    return lifted, VideoFeatures(frames_VFD, video.mask_VF)


def pooled(model: GARE, pooling: str, temperature: float) -> Any:
    settings = [f"interaction.pooling={pooling}", f"interaction.pooling_temperature={temperature}"]
    config = GareConfig.load(model.config.to_values(), settings)
    interaction = build_interaction(config.interaction, model.dim).to(model.device).eval()
    interaction.load_state_dict(copy.deepcopy(model.interaction.state_dict()))
    return interaction


def recalls_of(scores_TV: Tensor, video_of_text: Tensor) -> list[float]:
    metrics = retrieval_metrics(scores_TV.float().cpu(), video_of_text)
    return [100 * each for each in (metrics.recall_at_1, metrics.recall_at_5, metrics.recall_at_10)]


# --- the way home -------------------------------------------------------------------------------------------


def send_student(out: Path) -> None:
    """What the student has other than gare-mini, in half precision; the words, half of it, are the same."""
    model = GARE.from_pretrained(trained(Path("runs/student")))
    own = GARE.from_pretrained(MINI).state_dict()
    changed = {
        name: tensor.half() if tensor.ndim > 1 else tensor
        for name, tensor in model.state_dict().items()
        if name not in own or not torch.equal(own[name], tensor)
    }
    out.mkdir(parents=True, exist_ok=True)
    whole = Path("runs/student.safetensors")
    save_file(changed, whole, metadata={"config": json.dumps(model.config.to_values())})
    with whole.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(PART_BYTES), b""), start=1):
            (out / f"student.{number:02}").write_bytes(part)
    shutil.copy("runs/choice.json", out)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    print(f"{out}: {names}; {whole.stat().st_size / 1e6:.1f} MB of weights")


def receive_student(parts: Sequence[Path], out: Path) -> None:
    """A saved model from the parts, with what did not travel from gare-mini."""
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = out.with_suffix(".safetensors")
    whole.write_bytes(b"".join(part.read_bytes() for part in sorted(parts)))
    with safe_open(whole, "pt") as file:
        values = json.loads(file.metadata()["config"])
    model = GARE(GareConfig.load(values), pretrained_towers=False)
    own = GARE.from_pretrained(MINI).state_dict()
    state = {**{name: own[name] for name in model.state_dict() if name in own}, **load_file(whole)}
    model.load_state_dict(state)
    model.save_pretrained(out)
    whole.unlink()
    print(f"saved {out}")


def build_chosen(best: dict[str, Any], num_captions: int, out: Path) -> None:
    """The model of a row of the table, bank filled: what `pack` takes."""
    plain = out.with_name(out.name + "-without-bank")
    share, size = best["share"], best["size"]
    settings = [
        f"encoder.image_size={size}",
        f"interaction.pooling={best['pooling']}",
        f"interaction.pooling_temperature={best['pooling_temperature']}",
    ]
    student = trained(Path("runs/student")) if share else Path()
    mixture(student, share, settings).save_pretrained(plain)
    if best["bank_share"] == 0:
        plain.replace(out)
    else:
        banked = [
            f"encoder.bank_share={best['bank_share']}",
            f"encoder.bank_temperature={best['bank_temperature']}",
        ]
        with_bank(str(plain), [Path(each) for each in SETS], num_captions, banked).save_pretrained(out)
        shutil.rmtree(plain)
    print(f"saved {out}")


if __name__ == "__main__":
    main()
