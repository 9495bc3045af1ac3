"""Probes of rankings, of cost, and of files that training left. Each returns its numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gare.analysis.ablations import read_ablation
from gare.analysis.coverage import gallery_coverage
from gare.analysis.dynamics import read_probe, smooth
from gare.analysis.flops import BATCH, FRAMES, count_flops, count_parameters, paper_table
from gare.analysis.negatives import HardNegatives, examples, false_negatives, forgiven_recall, hard_negatives
from gare.analysis.pairs import unit
from gare.analysis.statistics import Paired, Spread
from gare.analysis.store import Numbers, fingerprint
from gare.analysis.study import NotMeasured, Study
from gare.analysis.subject import Subject
from gare.analysis.timing import measure_costs
from gare.data.loader import FrameSource
from gare.data.manifest import Row
from gare.scoring.pooling import mean_weights, weighted_mean
from gare.types import TextFeatures, VideoFeatures

THUMBNAIL = 192
TIMED_PAIRS = 64


def measure_dynamics(study: Study) -> Numbers:
    """The records of `gare train --probe`, and where their curves start, turn and end."""
    if study.run is None:
        raise NotMeasured("No training run was given: pass --run FOLDER of a 'gare train … --probe'.")
    records = {name: torch.tensor(column) for name, column in read_probe(study.run).items()}
    values: dict[str, Any] = {
        "side": study.subject.model.config.interaction.corrected_side,
        "num_records": len(records["step"]),
        "last_step": int(records["step"][-1]),
    }
    for name, column in records.items():
        if name != "step":
            values[name] = curve_summary(column)
    return Numbers.of(values, {"records": records})


def curve_summary(column: Tensor) -> dict[str, float]:
    """Start, end and extremes of a curve, after a running mean over a tenth of it."""
    known = column[column.isfinite()]
    if not len(known):
        return {}
    curve = smooth(known, max(1, len(known) // 10))
    lowest = int(curve.argmin())
    return {
        "start": float(curve[0]),
        "end": float(curve[-1]),
        "lowest": float(curve[lowest]),
        "lowest_at": lowest / max(1, len(curve) - 1),
        "highest": float(curve.max()),
    }


def measure_hard_negatives(study: Study) -> Numbers:
    """Close videos before and after the increment, and pairs that may match without being annotated."""
    subject, gallery = study.subject, study.gallery
    study.need_videos(3)
    before, after = subject.geometry.plain_cosine, subject.geometry.cosine
    found = hard_negatives(before, after, subject.text.text_TD)
    chosen = examples(found) if study.has_increments else {"first": 0}
    shown = {name: _example(study, found, text) for name, text in chosen.items()}
    suspects = false_negatives(after, subject.text.text_TD, mean_vectors(subject))
    recall, forgiven = forgiven_recall(after, suspects)
    pairs = list(zip(suspects.first, suspects.second, strict=True))
    suspect_table: dict[str, Any] = {
        "video_a": [gallery.videos[a].video_id for a, _ in pairs],
        "caption_a": [gallery.captions[a] for a, _ in pairs],
        "video_b": [gallery.videos[b].video_id for _, b in pairs],
        "caption_b": [gallery.captions[b] for _, b in pairs],
    }
    suspect_table |= {k: v for k, v in asdict(suspects).items() if k not in ("first", "second")}
    values = {
        "num_neighbours": found.neighbour_TK.shape[1],
        "margin": Paired.of(found.margin_after_T, found.margin_before_T),
        "margin_before": Spread.of(found.margin_before_T),
        "margin_after": Spread.of(found.margin_after_T),
        "ahead_before": float((found.margin_before_T > 0).double().mean()),
        "ahead_after": float((found.margin_after_T > 0).double().mean()),
        "examples": shown,
        "recall_at_1": recall,
        "recall_at_1_forgiven": forgiven,
        "num_suspects": len(suspects),
        "num_confused": sum(suspects.confused),
    }
    for path in {video for example in shown.values() for video in example["videos"]}:
        row = next(row for row in gallery.videos if row.video_id == path)
        save_thumbnail(gallery.source, row, study)
    for a, b in pairs[:3]:
        save_thumbnail(gallery.source, gallery.videos[a], study)
        save_thumbnail(gallery.source, gallery.videos[b], study)
    margins: dict[str, Any] = {
        "video_id": [video.video_id for video in gallery.videos],
        "caption": gallery.captions,
        "margin_before": found.margin_before_T,
        "margin_after": found.margin_after_T,
    }
    return Numbers.of(values, {"margins": margins, "false_negatives": suspect_table})


def _example(study: Study, found: HardNegatives, text: int) -> dict[str, Any]:
    near = found.neighbour_TK[text].tolist()
    ids = [study.gallery.videos[index].video_id for index in (text, *near)]
    return {
        "caption": study.gallery.captions[text],
        "videos": ids,
        "captions": [study.gallery.captions[index] for index in (text, *near)],
        "before": [float(found.own_before_T[text]), *found.near_before_TK[text].tolist()],
        "after": [float(found.own_after_T[text]), *found.near_after_TK[text].tolist()],
    }


def save_thumbnail(source: FrameSource, row: Row, study: Study) -> None:
    """The middle frame, small; kept, since frames may be slow to come by."""
    path = thumbnail_path(study, row.video_id)
    if path.exists():
        return
    frames = source.read(row)
    image = frames[len(frames) // 2].convert("RGB")
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=85)


def thumbnail_path(study: Study, video_id: str) -> Any:
    return study.thumbnails / thumbnail_name(video_id)


def thumbnail_name(video_id: str) -> str:
    """A file name for any id; a long one (file systems stop at 255 bytes) ends in a hash.

    >>> thumbnail_name("clips/a b.mp4")
    'clips%2Fa%20b.mp4.jpg'
    """
    from urllib.parse import quote

    name = quote(video_id, safe="")
    return f"{name if len(name) <= 150 else f'{name[:120]}-{fingerprint(video_id)}'}.jpg"


def mean_vectors(subject: Subject) -> Tensor:
    """One vector a video: the mean of its real frames, [V, D]."""
    video = subject.video
    weights_VF = mean_weights(video.mask_VF, mask_frames=True, dtype=torch.float32)
    return weighted_mean(video.frames_VFD.masked_fill(~video.mask_VF[..., None], 0), weights_VF)


def measure_coverage(study: Study) -> Numbers:
    """GARE's top 10 within the first k by the plain cosine of text and mean frame, for several galleries."""
    study.need_increments()
    subject, size = study.subject, len(study.subject.video)
    plain_TV = unit(subject.text.text_TD) @ unit(mean_vectors(subject)).mT
    sizes = sorted({max(min(size, 20), size // part) for part in (1, 2, 4, 8)})
    curves = gallery_coverage(
        plain_TV, subject.geometry.cosine, sizes, draws=5, generator=torch.Generator().manual_seed(0)
    )
    table: dict[str, Any] = {
        "gallery": [curve.gallery for curve in curves for _ in curve.k],
        "k": [k for curve in curves for k in curve.k],
        "coverage": [share for curve in curves for share in curve.coverage],
    }
    summary = [
        {
            "gallery": curve.gallery,
            "needed_for_99": curve.needed_for_99,
            **{f"at_{k}": curve.coverage[k - 1] if k <= curve.gallery else None for k in (10, 50, 100)},
        }
        for curve in curves
    ]
    return Numbers.of({"curves": summary}, {"curves": table})


def measure_efficiency(study: Study) -> Numbers:
    """Parameters, operations, time and memory by module, beside the paper's and the baseline's."""
    views = (
        {"model": study.subject}
        if study.baseline is None
        else {
            "baseline": study.baseline,
            "model": study.subject,
        }
    )
    # Counted before timing, which moves the models to the study's device.
    parameters = {role: count_parameters(subject.model) for role, subject in views.items()}
    flops = {role: count_flops(subject.model) for role, subject in views.items()}
    costs = measure_costs(
        {
            f"{role}/{name}": call
            for role, subject in views.items()
            for name, call in _calls(subject, study).items()
        },
        study.device,
    )
    values = {
        "paper": paper_table(),
        "batch": BATCH,
        "frames": FRAMES,
        "device": _describe(study.device),
        "parameters": parameters,
        "flops": flops,
        "costs": costs,
        "timed_pairs": TIMED_PAIRS,
        "pairs_scored": [len(study.subject.text), len(study.subject.video)],
    }
    return Numbers.of(values)


def _calls(subject: Subject, study: Study) -> dict[str, Any]:
    """What is timed, on the study's device; the model goes there and stays."""
    device = study.device
    model = subject.model.to(device)
    few = slice(0, TIMED_PAIRS)
    text: TextFeatures = subject.text.to(device)
    video: VideoFeatures = subject.video.to(device)
    size = model.backbone.image_format.size
    frames = subject.video.frames_VFD.shape[1]
    pixels_VFCHW = torch.zeros(2, frames, 3, size, size, device=device)
    mask_VF = torch.ones(2, frames, dtype=torch.bool, device=device)
    captions = study.gallery.captions[:16]
    calls = {
        "encode 16 texts": lambda: model.encode_text(captions),
        "encode 2 videos": lambda: model.video_features(pixels_VFCHW, mask_VF),
        "score, factored": lambda: model.score(text, video, method="factored"),
        "score, dense": lambda: model.score(text[few], video[few], method="dense"),
    }
    return calls


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def measure_ablations(study: Study) -> Numbers:
    """Tables of `gare ablate`, ready to be drawn."""
    if not study.ablations:
        raise NotMeasured("No ablation was given: pass --ablation FOLDER, the --out of 'gare ablate'.")
    return Numbers.of({"figures": [read_ablation(folder) for folder in study.ablations]})
