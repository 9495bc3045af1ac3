"""Training runs: what they learn, and that interruptions, chunks and processes change nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gare import GARE, GareConfig, ObjectiveConfig
from gare.data.loader import FrameSource
from gare.errors import CheckpointError, ConfigError, GareError, TrainingError
from gare.evaluate.similarity import score_split
from gare.train import RunConfig, train
from gare.train.batches import FeatureBatches, PreloadedBatches
from gare.train.distributed import Processes
from gare.train.features import FrozenFeatures
from gare.train.loop import _build_model
from gare.train.report import RunLog
from gare.train.sources import open_source
from gare.train.step import PairBatch, compute_gradients, make_encode
from gare.train.teachers import make_teachers
from toy_data import recipe, write_dataset

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
    command = [
        sys.executable,
        "-m",
        "gare",
        "train",
        str(tmp_path / "recipe.toml"),
        "--device",
        "cpu",
        "--out",
    ]
    train(RunConfig.load(settings), tmp_path / "whole", device=CPU)

    process = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    pointer, deadline = tmp_path / "killed" / "checkpoints" / "latest", time.monotonic() + 60
    while time.monotonic() < deadline and not (pointer.exists() and pointer.read_text() >= "step-00000005"):
        time.sleep(0.005)
    os.kill(process.pid, how)
    assert process.wait(timeout=60) == (130 if how == signal.SIGINT else -how)
    assert not (tmp_path / "killed" / "last").exists()  # it was killed before its end

    subprocess.run(
        [*command, str(tmp_path / "killed"), "--resume"], check=True, timeout=120, capture_output=True
    )
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name

    def logged(folder):
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    assert logged("killed") == logged("whole")


def test_preparing_in_mid_run_leaves_the_count_of_steps_alone(tmp_path):
    """The features of val are computed at the first look."""
    with RunLog(tmp_path, 0, enabled=True) as log:
        log.caching(400, 400)
        log.start(10, 0, missing=0)
        log.advance()
        log.caching(171, 250)
        shown = {task.description: (task.completed, task.total) for task in log._bar.tasks}
        assert shown == {"training": (1, 10), "preparing": (171, 250)}
        log.caching(250, 250)
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
    settings["data"] = {**settings["data"], "cache_features": True}
    with pytest.raises(ConfigError, match="teachers need data"):
        RunConfig.load(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("backbone.image_size=64", "pictures of 64 pixels and the model at 32"),
        ("backbone.vocabulary=300", "has another tokenizer than the model"),
        ("backbone.max_words=4", "or reads fewer words"),
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
        torch.randn(size, 3, 3, 32, 32, generator=generator, dtype=torch.float64),
        torch.tensor([[True, True, number % 2 == 0] for number in range(size)]),
        torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])[:size],
    )


def teacher_logits(manifest, share, processes, chunk_size=None):
    settings = [RunConfig.load(recipe(manifest, seed=seed)) for seed in (5, 6)]
    models = [_build_model(each, processes).double() for each in settings]
    return make_teachers(models, processes, autocast=False, chunk_size=chunk_size)(share)


def gradients(manifest, *, chunk_size=None, interaction=None):
    settings = recipe(manifest)
    settings["model"] = {**settings["model"], "interaction": interaction or {}}
    model = _build_model(RunConfig.load(settings), ALONE).double()
    batch = gradient_batch()
    batch.mask_TW[:, 0] = True
    encode = make_encode(model, autocast=False)
    loss = compute_gradients(
        model, batch, ObjectiveConfig(), ALONE, encode=encode, chunk_size=chunk_size, psi_seed=3,
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
from gare.train.features import FrozenFeatures
from gare.train.loop import _build_model
from gare.train.sources import open_source
from gare.train.step import compute_gradients, make_encode

torch.set_num_threads(1)
processes = join(torch.device("cpu"))
model = _build_model(RunConfig.load(recipe(Path(sys.argv[1]))), processes).double()
batch = gradient_batch()
batch.mask_TW[:, 0] = True
share = len(batch) // processes.world_size
mine = batch[processes.rank * share : (processes.rank + 1) * share]
loss = compute_gradients(model, mine, ObjectiveConfig(), processes, encode=make_encode(model, autocast=False),
                         chunk_size=int(sys.argv[3]) or None, psi_seed=3,
                         teacher_logits_TV=teacher_logits(Path(sys.argv[1]), mine, processes))
if processes.is_main:
    save_file({name: parameter.grad for name, parameter in model.named_parameters()}, sys.argv[2])
leave()
"""


@pytest.mark.parametrize(("num_processes", "chunk_size"), [(1, 0), (2, 0), (4, 0), (2, 1)])
def test_any_number_of_processes_gives_the_same_gradients(manifest, tmp_path, num_processes, chunk_size):
    """Real processes over gloo, psi's dropout on, two captions of one video in the batch, in float64."""
    script, out = tmp_path / "worker.py", tmp_path / "gradients.safetensors"
    script.write_text(WORKER)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_processes}",
        "--master-port=0",
    ]
    tests = Path(__file__).parent
    arguments = [str(script), str(manifest), str(out), str(chunk_size), str(tests)]
    environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *arguments],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    settings = RunConfig.load(recipe(manifest))
    model = _build_model(settings, ALONE).double()
    batch = gradient_batch()
    batch.mask_TW[:, 0] = True
    compute_gradients(
        model, batch, ObjectiveConfig(), ALONE, encode=make_encode(model, autocast=False), psi_seed=3,
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


def test_cached_features_train_as_pixels_do(manifest, tmp_path):
    """With a frozen image tower, features computed once give the very same run."""
    settings = recipe(manifest, epochs=2)
    settings["model"] = {**settings["model"], "backbone": {"family": "tiny", "freeze_image": True}}
    train(RunConfig.load(settings), tmp_path / "pixels", device=CPU)
    settings["data"] = {**settings["data"], "cache_features": True}
    train(RunConfig.load(settings), tmp_path / "features", device=CPU)
    ours, theirs = weights(tmp_path / "features"), weights(tmp_path / "pixels")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-5)


def test_preloaded_frames_train_the_same(manifest, tmp_path):
    """The frames are of one colour each, so crops and resampling leave them as they are."""
    settings = recipe(manifest, epochs=2)
    runs = {"loader": (False, 0), "preloaded": (True, 0), "preloaded, drawn ahead": (True, 2)}
    for name, (preload, num_workers) in runs.items():
        changes = {"augmentation": "light", "preload": preload, "num_workers": num_workers}
        settings["data"] = {**settings["data"], **changes}
        train(RunConfig.load(settings), tmp_path / name, device=CPU)
    theirs = weights(tmp_path / "loader")
    for run in list(runs)[1:]:
        for name, tensor in weights(tmp_path / run).items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)


def test_views_of_one_colour_train_as_cached_features_do(manifest, tmp_path):
    """Crops of a frame of one colour are that frame: only where the views are kept and found differs."""
    settings = recipe(manifest, epochs=2)
    settings["model"] = {**settings["model"], "backbone": {"family": "tiny", "freeze_image": True}}
    for name, changes in {"once": {}, "views": {"augmentation": "light", "views": 3}}.items():
        settings["data"] = {**settings["data"], "cache_features": True, **changes}
        train(RunConfig.load(settings), tmp_path / name, device=CPU)
    ours, theirs = weights(tmp_path / "views"), weights(tmp_path / "once")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


def test_each_pair_draws_one_of_the_views_of_its_video(manifest, tmp_path):
    """Strong views differ in colour: over the epochs several are seen, each as it was computed."""
    settings = recipe(manifest)
    settings["data"] = {**settings["data"], "cache_features": True, "augmentation": "strong", "views": 4}
    settings["model"] = {**settings["model"], "backbone": {"family": "tiny", "freeze_image": True}}
    config = RunConfig.load(settings)
    model, source = _build_model(config, ALONE), open_source(config)
    features = FrozenFeatures(model, source, tmp_path)
    kept_NFE, _ = features.for_training("strong", 4)
    seen: dict[int, set[int]] = {}
    for epoch in range(12):
        for batch in FeatureBatches(model, source, config, ALONE, features).batches(epoch):
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
    settings["data"] = {**settings["data"], "preload": True, "mixed_share": 0.25}
    config = RunConfig.load(settings)
    model, source = _build_model(config, ALONE), open_source(config)
    said: list[list[str]] = []
    tokenize = model.backbone.tokenize
    model.backbone.tokenize = lambda texts: said.append(list(texts)) or tokenize(texts)
    (batch,) = PreloadedBatches(model, source, config, ALONE, lambda done, total: None).batches(0)
    (captions,) = said
    assert captions[:2] == [
        f"{own.removesuffix(' ' + other)} {other}"
        for own, other in zip(captions[:2], captions[2:4], strict=True)
    ]
    assert all(len(caption.split()) == (4 if place < 2 else 2) for place, caption in enumerate(captions))
    plain = source.manifest.captions("train")
    for place, caption in enumerate(captions[2:], start=2):
        assert caption == plain[int(batch.video_index[place])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_features": True, "augmentation": "light"}, "or several views"),
        ({"cache_features": True, "views": 2}, "or several views"),
        ({"views": 2}, "data.views needs cache_features"),
        ({"mixed_share": 0.25}, "data.mixed_share needs preload"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(manifest, changes, message):
    settings = recipe(manifest)
    settings["data"] = {**settings["data"], **changes}
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(settings)


def test_caching_features_of_a_tower_that_learns_is_refused(manifest, tmp_path):
    settings = recipe(manifest)
    settings["data"] = {**settings["data"], "cache_features": True}
    with pytest.raises(ConfigError, match="needs a frozen image tower"):
        train(RunConfig.load(settings), tmp_path / "run", device=CPU)


def test_a_second_stage_starts_from_the_first(manifest, tmp_path):
    first = recipe(manifest, epochs=1)
    first["model"] = {**first["model"], "increment": {"enabled": False}}
    best = train(RunConfig.load(first), tmp_path / "first", device=CPU)
    second = RunConfig.load(recipe(manifest, init_from=str(best)))
    model = _build_model(second, ALONE)
    start = GARE.from_pretrained(best)
    assert torch.equal(model.backbone.words.weight, start.backbone.words.weight)
    assert model.increment_net is not None
