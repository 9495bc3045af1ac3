"""Training runs: what they learn, and that interruptions, chunks and processes change nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gare import GARE, GareConfig, ObjectiveConfig
from gare.data.loader import FrameSource
from gare.errors import CheckpointError, ConfigError, GareError, TrainingError
from gare.evaluate.frozen_features import FrozenFeatures
from gare.evaluate.model_evaluation import score_split
from gare.train import RunConfig, train
from gare.train.distributed import Processes
from gare.train.gradient_step import PairBatch, compute_gradients, make_encode
from gare.train.replayed_gradients import ReplayedGradients
from gare.train.run_log import RunLog
from gare.train.starting_model import build_model
from gare.train.teachers import make_teachers
from gare.train.train_state import Progress
from gare.train.training_frames import open_frames, open_source
from servers import HANG_S, free_port
from stand_in_recorder import StandIn
from toy_data import recipe, write_dataset
from warm import WarmProcess, run_gare, run_python

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "last" / "model.safetensors")


def test_a_run_learns_and_leaves_everything_behind(manifest, tmp_path):
    config = RunConfig.load(recipe(manifest, epochs=60, batch_size=8))
    best = train(config, tmp_path / "run", device=CPU)
    assert RunConfig.load(tmp_path / "run" / "config.toml") == config
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 60
    assert {"term/contrastive", "term/kl", "term/radius", "term/direction", "pairs_per_second"} <= steps[
        0
    ].keys()
    assert steps[-1]["term/contrastive"] < 0.3 * steps[0]["term/contrastive"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    model = GARE.from_pretrained(best)
    scored = score_split(model, FrameSource.open(manifest, 3), "test")
    assert torch.equal(scored.scores_TV.argmax(dim=1), scored.video_of_text)  # it has learnt them all
    assert json.loads((best / "selection.json").read_text())["selected_on"] == "val"


# The clock that stops it runs in the process that trains, and is as slow as that is.
KILLED = """
import os, sys, threading, time
from pathlib import Path
from gare.cli.main import main
out, how, *arguments = sys.argv[1:]
pointer = Path(out) / "checkpoints" / "latest"

def kill_after_five_steps():
    while not (pointer.exists() and pointer.read_text() >= "step-00000005"):
        time.sleep(0.001)
    os.kill(os.getpid(), int(how))

threading.Thread(target=kill_after_five_steps, daemon=True).start()
sys.argv = ["gare", *arguments]
main()
"""


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({}, signal.SIGKILL),
        ({"ema_decay": 0.9, "chunk_size": 2}, signal.SIGKILL),
        ({"checkpoint_every": 5}, signal.SIGINT),
    ],
    ids=["kill-9", "kill-9-average-and-chunks", "ctrl-c"],
)
def test_stopping_in_mid_epoch_and_resuming_changes_nothing(manifest, tmp_path, changes, how):
    settings = recipe(manifest, epochs=12, batch_size=2, **changes)
    (tmp_path / "recipe.toml").write_text(RunConfig.load(settings).to_toml())
    killed = tmp_path / "killed"
    arguments = ["train", str(tmp_path / "recipe.toml"), "--device", "cpu", "--out", str(killed)]
    train(RunConfig.load(settings), tmp_path / "whole", device=CPU)

    done = run_python(["-c", KILLED, str(killed), str(int(how)), *arguments], timeout=HANG_S)
    assert done.returncode == (130 if how == signal.SIGINT else -how), done.stderr
    assert not (killed / "last").exists()  # it was killed before its end
    assert run_gare(*arguments, "--resume").returncode == 0
    whole, resumed = weights(tmp_path / "whole"), weights(killed)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name

    def logged(folder):
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    assert logged("killed") == logged("whole")


def test_preparing_in_mid_run_leaves_the_count_of_steps_alone(tmp_path):
    """The features of val are computed at the first evaluation."""
    with RunLog(tmp_path, Progress(), enabled=True) as log:
        log.preparing(400, 400)
        log.start(10, 0, missing=0)
        log.advance()
        log.preparing(171, 250)
        shown = {task.description: (task.completed, task.total) for task in log._bar.tasks}
        assert shown == {"training": (1, 10), "preparing": (171, 250)}
        log.preparing(250, 250)
        assert [task.description for task in log._bar.tasks] == ["training"]


def test_a_model_takes_over_what_its_teachers_know(manifest, tmp_path):
    """With hardly anything else in the loss a student ends where its teacher is."""
    teacher = train(
        RunConfig.load(recipe(manifest, epochs=60, batch_size=8)), tmp_path / "teacher", device=CPU
    )
    settings = recipe(manifest, epochs=60, batch_size=8, seed=1, teachers=[str(teacher)])
    settings["objective"] = {"teacher_weight": 100.0}  # beside it, the other terms hardly count
    train(RunConfig.load(settings), tmp_path / "student", device=CPU)
    lines = map(json.loads, (tmp_path / "student" / "metrics.jsonl").read_text().splitlines())
    terms = [line["term/teacher"] for line in lines if "term/teacher" in line]
    assert terms[-1] < 0.1 * terms[0]
    settings["data"] = {**settings["data"], "frames": "cached"}
    with pytest.raises(ConfigError, match="teachers need data"):
        RunConfig.load(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("encoder.image_size=64", "pictures of 64 pixels and the model of 32"),
        ("encoder.vocabulary=300", "has another tokenizer than the model"),
        ("encoder.max_words=4", "or reads fewer words"),
        (None, "teachers: .* is not a folder here"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_decoded(
    manifest, tmp_path, change, message
):
    settings = recipe(manifest, teachers=[str(tmp_path / "teacher")])
    if change:
        GARE(GareConfig.load(settings["model"], [change])).save_pretrained(tmp_path / "teacher")
    with pytest.raises(GareError, match=message):
        train(RunConfig.load(settings), tmp_path / "run", device=CPU)


def gradient_batch(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    return PairBatch(
        torch.randint(512, (size, 6), generator=generator),
        torch.rand(size, 6, generator=generator) < 0.8,
        torch.randint(256, (size, 3, 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.tensor([[True, True, number % 2 == 0] for number in range(size)]),
        torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])[:size],
    )


def teacher_logits(manifest, share, processes, chunk_size=None):
    settings = [RunConfig.load(recipe(manifest, seed=seed)) for seed in (5, 6)]
    models = [build_model(each, processes).double() for each in settings]
    return make_teachers(models, processes, autocast=False, chunk_size=chunk_size)(share)


def gradients(manifest, *, chunk_size=None, interaction=None):
    settings = recipe(manifest)
    settings["model"] = {**settings["model"], "interaction": interaction or {}}
    model = build_model(RunConfig.load(settings), ALONE).double()
    batch = gradient_batch()
    batch.mask_TW[:, 0] = True
    encode = make_encode(model, autocast=False)
    loss = compute_gradients(
        model, batch, ObjectiveConfig(), ALONE, encode=encode, chunk_size=chunk_size, interaction_seed=3,
        teacher_logits_TV=teacher_logits(manifest, batch, ALONE, chunk_size),
    )  # fmt: skip
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 8])
@pytest.mark.parametrize("context", ["frames", "words"])
def test_chunks_give_the_same_gradients(manifest, chunk_size, context):
    loss, whole = gradients(manifest, interaction={"context": context})
    chunked_loss, chunked = gradients(manifest, interaction={"context": context}, chunk_size=chunk_size)
    torch.testing.assert_close(chunked_loss.total, loss.total)
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


WORKER = """
import sys, torch
sys.path.insert(0, sys.argv[4])
from pathlib import Path
from safetensors.torch import save_file
from test_train import gradient_batch, recipe, teacher_logits
from gare import ObjectiveConfig
from gare.train import RunConfig
from gare.train.distributed import join, leave
from gare.train.gradient_step import compute_gradients, make_encode
from gare.train.starting_model import build_model

torch.set_num_threads(1)
processes = join(torch.device("cpu"))
model = build_model(RunConfig.load(recipe(Path(sys.argv[1]))), processes).double()
batch = gradient_batch()
batch.mask_TW[:, 0] = True
share = len(batch) // processes.world_size
mine = batch[processes.rank * share : (processes.rank + 1) * share]
loss = compute_gradients(model, mine, ObjectiveConfig(), processes, encode=make_encode(model, autocast=False),
                         chunk_size=int(sys.argv[3]) or None, interaction_seed=3,
                         teacher_logits_TV=teacher_logits(Path(sys.argv[1]), mine, processes))
if processes.is_main:
    save_file({name: parameter.grad for name, parameter in model.named_parameters()}, sys.argv[2])
leave()
"""


@pytest.mark.parametrize(("num_processes", "chunk_size"), [(1, 0), (2, 0), (4, 0), (2, 1)])
def test_any_number_of_processes_gives_the_same_gradients(manifest, tmp_path, num_processes, chunk_size):
    """Real processes over gloo, psi's dropout on, two captions of one video in the batch, in float64."""
    out = tmp_path / "gradients.safetensors"
    arguments = [str(manifest), str(out), str(chunk_size), str(Path(__file__).parent)]
    # What torchrun tells its processes; tests/golden starts some with torchrun itself.
    shared = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes, "MASTER_PORT": free_port()}
    errors = [open(tmp_path / f"errors{rank}", "w+") for rank in range(num_processes)]  # noqa: SIM115
    workers = []
    for rank in range(num_processes):
        told = {**shared, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        env = {**os.environ, **{name: str(value) for name, value in told.items()}}
        workers.append(WarmProcess(["-c", WORKER, *arguments], stderr=errors[rank], env=env))
    for worker, file in zip(workers, errors, strict=True):
        code = worker.wait(HANG_S)
        file.seek(0)
        assert code == 0, file.read()
        file.close()
    settings = RunConfig.load(recipe(manifest))
    model = build_model(settings, ALONE).double()
    batch = gradient_batch()
    batch.mask_TW[:, 0] = True
    compute_gradients(
        model, batch, ObjectiveConfig(), ALONE, encode=make_encode(model, autocast=False), interaction_seed=3,
        teacher_logits_TV=teacher_logits(manifest, batch, ALONE),
    )  # fmt: skip
    found = load_file(out)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-9, rtol=1e-9, msg=name)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(manifest, tmp_path):
    settings = recipe(manifest, epochs=50, batch_size=8)
    settings["optimizer"] = {"learning_rate": 1e30, "clip_norm": 1e30, "warmup": 0.0}
    with pytest.raises(TrainingError, match=r"step \d+: .*(is not finite|NaN or infinity)"):
        train(RunConfig.load(settings), tmp_path / "run", device=CPU)


def test_a_run_folder_is_not_overwritten_or_mixed_up(manifest, tmp_path):
    config = RunConfig.load(recipe(manifest, epochs=1))
    train(config, tmp_path / "run", device=CPU)
    with pytest.raises(CheckpointError, match="already holds a run; pass --resume"):
        train(config, tmp_path / "run", device=CPU)
    with pytest.raises(ConfigError, match="has other settings than those asked for"):
        train(RunConfig.load(recipe(manifest, epochs=2)), tmp_path / "run", resume=True, device=CPU)
    with pytest.raises(CheckpointError, match="is not a run that can be resumed"):
        train(config, tmp_path / "nothing", resume=True, device=CPU)
    before = weights(tmp_path / "run")
    train(config, tmp_path / "run", resume=True, device=CPU)  # nothing left to do
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / "run").items())


@pytest.mark.parametrize("padding", ["masked", "counted"])
def test_cached_features_train_as_pixels_do(manifest, tmp_path, padding):
    """With a frozen image tower, features computed once give the very same run."""
    settings = recipe(manifest, epochs=2)
    settings["model"] = {**settings["model"], "encoder": {"name": "tiny", "freeze_image": True}}
    if padding == "counted":  # as in the released code; a toy video has three frames
        settings["model"]["interaction"] = {"pooling": "text_conditioned", "mask_frames": False}
        settings["data"] = {**settings["data"], "num_frames": 4}
    train(RunConfig.load(settings), tmp_path / "pixels", device=CPU)
    settings["data"] = {**settings["data"], "frames": "cached"}
    train(RunConfig.load(settings), tmp_path / "features", device=CPU)
    ours, theirs = weights(tmp_path / "features"), weights(tmp_path / "pixels")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6 if padding == "masked" else 1e-5, rtol=1e-5)


def test_preloaded_frames_train_the_same(manifest, tmp_path):
    """The frames are of one colour each, so crops and resampling leave them as they are."""
    settings = recipe(manifest, epochs=2)
    runs = {"loader": ("stream", 0), "preloaded": ("preload", 0), "preloaded, drawn ahead": ("preload", 2)}
    for name, (way, num_workers) in runs.items():
        changes = {"frames": {"name": way, "augmentation": "light"}, "num_workers": num_workers}
        settings["data"] = {**settings["data"], **changes}
        train(RunConfig.load(settings), tmp_path / name, device=CPU)
    theirs = weights(tmp_path / "loader")
    for run in list(runs)[1:]:
        for name, tensor in weights(tmp_path / run).items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frames", ["stream", "preload", "cached"])
def test_a_replayed_run_ends_with_the_same_weights(manifest, tmp_path, monkeypatch, frames):
    config = RunConfig.load(
        recipe(manifest, epochs=6, batch_size=4, ema_decay=0.5), [f"data.frames={frames}"]
    )
    if frames == "cached":
        config = RunConfig.load(config.to_values(), ["model.encoder.freeze_image=true"])
    train(config, tmp_path / "run", device=CPU)
    recorders = []

    class Replaying(ReplayedGradients):
        def __init__(self, model, *arguments, **options):
            recorders.append(StandIn(model))
            super().__init__(model, *arguments, **options | {"recorder": recorders[0]})

    monkeypatch.setattr("gare.train.training_run.ReplayedGradients", Replaying)
    train(config, tmp_path / "replayed", device=CPU)
    assert recorders[0].replayed > recorders[0].recorded > 1  # anew after every evaluation
    expected, found = weights(tmp_path / "run"), weights(tmp_path / "replayed")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_views_of_one_colour_train_as_cached_features_do(manifest, tmp_path):
    """Crops of a frame of one colour are that frame: only where the views are kept and found differs."""
    settings = recipe(manifest, epochs=2)
    settings["model"] = {**settings["model"], "encoder": {"name": "tiny", "freeze_image": True}}
    for name, changes in {"once": {}, "views": {"augmentation": "light", "views": 3}}.items():
        settings["data"] = {**settings["data"], "frames": {"name": "cached", **changes}}
        train(RunConfig.load(settings), tmp_path / name, device=CPU)
    ours, theirs = weights(tmp_path / "views"), weights(tmp_path / "once")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


def test_each_pair_draws_one_of_the_views_of_its_video(manifest, tmp_path):
    """Strong views differ in colour: over the epochs several are seen, each as it was computed."""
    settings = recipe(manifest)
    frames = {"name": "cached", "augmentation": "strong", "views": 4}
    settings["data"] = {**settings["data"], "frames": frames}
    settings["model"] = {**settings["model"], "encoder": {"name": "tiny", "freeze_image": True}}
    config = RunConfig.load(settings)
    model, source = build_model(config, ALONE), open_source(config.data)
    kept_NFE, _ = FrozenFeatures(model, source, tmp_path).for_training("strong", 4)
    seen: dict[int, set[int]] = {}
    for epoch in range(12):
        for batch in open_frames(model, source, config, ALONE, print).batches(epoch):
            for video, frames_FE in zip(batch.video_index.tolist(), batch.frames, strict=True):
                own_4FE = kept_NFE[4 * video : 4 * video + 4]
                (view,) = (own_4FE == frames_FE).all(dim=(1, 2)).nonzero().flatten().tolist()
                seen.setdefault(video, set()).add(view)
    assert len(seen) == 8
    assert all(len(views) >= 3 for views in seen.values())
    one, *_ = tmp_path.glob("*/*.safetensors")
    written = one.stat().st_mtime_ns
    more, _ = FrozenFeatures(model, source, tmp_path).for_training("strong", 5)
    assert torch.equal(more.unflatten(0, (8, 5))[:, :4], kept_NFE.unflatten(0, (8, 4)))
    assert one.stat().st_mtime_ns == written
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2  # only the fifth views were computed


def test_mixed_pairs_show_and_say_both(manifest):
    settings = recipe(manifest, batch_size=8)
    settings["data"] = {**settings["data"], "frames": {"name": "preload", "mixed_share": 0.25}}
    config = RunConfig.load(settings)
    model, source = build_model(config, ALONE), open_source(config.data)
    said: list[list[str]] = []
    tokenize = model.encoder.tokenize
    model.encoder.tokenize = lambda texts: said.append(list(texts)) or tokenize(texts)
    (batch,) = open_frames(model, source, config, ALONE, print).batches(0)
    (captions,) = said
    assert captions[:2] == [
        f"{own.removesuffix(' ' + other)} {other}"
        for own, other in zip(captions[:2], captions[2:4], strict=True)
    ]
    assert all(len(caption.split()) == (4 if place < 2 else 2) for place, caption in enumerate(captions))
    plain = source.manifest.captions("train")
    for place, caption in enumerate(captions[2:], start=2):
        assert caption == plain[int(batch.video_index[place])]


def test_dropped_words_are_others_every_epoch(manifest):
    settings = recipe(manifest, batch_size=8)
    settings["data"] = {**settings["data"], "frames": {"name": "preload", "word_dropout": 0.5}}
    config = RunConfig.load(settings)
    model, source = build_model(config, ALONE), open_source(config.data)
    said: list[list[str]] = []
    tokenize = model.encoder.tokenize
    model.encoder.tokenize = lambda texts: said.append(list(texts)) or tokenize(texts)
    frames = open_frames(model, source, config, ALONE, print)
    plain = source.manifest.captions("train")
    for epoch in (0, 1, 0):
        (batch,) = frames.batches(epoch)
        for caption, video in zip(said[-1], batch.video_index.tolist(), strict=True):
            assert caption
            assert set(caption.split()) <= set(plain[video].split())
    assert said[0] == said[2] != said[1]
    assert any(len(caption.split()) == 1 for caption in said[0])


def test_swapped_words_are_the_same_words_in_another_order(manifest):
    settings = recipe(manifest, batch_size=8)
    settings["data"] = {**settings["data"], "frames": {"name": "preload", "word_swaps": 0.5}}
    config = RunConfig.load(settings)
    model, source = build_model(config, ALONE), open_source(config.data)
    said: list[list[str]] = []
    tokenize = model.encoder.tokenize
    model.encoder.tokenize = lambda texts: said.append(list(texts)) or tokenize(texts)
    frames = open_frames(model, source, config, ALONE, print)
    plain = source.manifest.captions("train")
    for epoch in (0, 1, 2, 3):
        (batch,) = frames.batches(epoch)
        for caption, video in zip(said[-1], batch.video_index.tolist(), strict=True):
            assert sorted(caption.split()) == sorted(plain[video].split())
    assert not {caption for captions in said for caption in captions} <= set(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": {"name": "cached", "augmentation": "light"}}, "or there are several views"),
        ({"cache_features": True, "augmentation": "light"}, "or there are several views"),
        ({"cache_features": True, "views": 2}, "or there are several views"),
        ({"cache_features": True, "draw_frames": True, "sampling": "uniform"}, "data: draw_frames needs fr"),
        ({"frames": {"draw_frames": True}}, "draw_frames needs sampling = 'uniform'"),
        ({"frames": {"views": 2}}, "data: views needs frames = 'cached'"),
        ({"views": 2}, "data: views needs frames = 'cached'"),
        ({"mixed_share": 0.25}, "data: mixed_share needs frames = 'preload'"),
        ({"preload": True, "cache_features": True}, "preload and cache_features exclude each other"),
        ({"frames": "cached", "preload": True}, "preload and cache_features exclude each other"),
        ({"preload": True, "augmentation": "randaugment"}, "must be 'off' or 'light' or 'strong'"),
        ({"frames": "streamed"}, "must be 'stream' or 'preload' or 'cached', not 'streamed'"),
        ({"frames": 3}, "data.frames"),
        ({"frames": {"name": ["cached"]}}, "must be 'stream' or 'preload' or 'cached'"),
        ({"preload": "yes"}, "data: preload: must be true or false, not 'yes'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(manifest, changes, message):
    settings = recipe(manifest)
    settings["data"] = {**settings["data"], **changes}
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(settings)


def test_caching_features_of_a_tower_that_learns_is_refused(manifest, tmp_path):
    settings = recipe(manifest)
    settings["data"] = {**settings["data"], "frames": "cached"}
    with pytest.raises(ConfigError, match="needs a frozen image tower"):
        train(RunConfig.load(settings), tmp_path / "run", device=CPU)


def test_a_second_stage_starts_from_the_first(manifest, tmp_path):
    first = recipe(manifest, epochs=1)
    first["model"] = {**first["model"], "increment": {"enabled": False}}
    best = train(RunConfig.load(first), tmp_path / "first", device=CPU)
    second = RunConfig.load(recipe(manifest, init_from=str(best)))
    model = build_model(second, ALONE)
    start = GARE.from_pretrained(best)
    assert torch.equal(model.encoder.words.weight, start.encoder.words.weight)
    assert model.interaction.has_increments
