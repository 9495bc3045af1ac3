"""Evaluate a model on a split: scores, metrics, provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from gare.data.loader import FrameSource
from gare.data.manifest import Split
from gare.evaluate.protocols import CaptionProtocol, evaluate_scores
from gare.evaluate.report import EvaluationResult, check_gallery, evaluation_result, hash_queries
from gare.evaluate.rescoring import Rescoring, dual_softmax
from gare.evaluate.similarity import SplitScores, score_split
from gare.model import GARE
from gare.types import VideoFeatures


def evaluate_model(
    model: GARE,
    source: FrameSource,
    split: Split,
    *,
    selected_on: str,
    seed: int | None = None,
    protocol: CaptionProtocol = "max_caption",
    rescoring: Rescoring = "none",
    num_workers: int = 0,
    allow_missing: bool = False,
    videos: VideoFeatures | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[EvaluationResult, SplitScores]:
    """Both directions on one split, with intervals; the score matrix comes along for saving.

    `videos` are features of the gallery, if they are at hand.
    """
    expected = source.manifest.header.expected.get(split)
    found = len(source.manifest.videos(split))
    missing = check_gallery(
        expected=found if expected is None else expected.videos, found=found, allow_missing=allow_missing
    )
    scored = score_split(
        model, source, split, num_workers=num_workers, videos=videos, on_progress=on_progress
    )
    scores, reverse = scored.scores_TV, None
    if rescoring == "dsl":
        # Each direction has its own prior: softmax over the other queries of that direction.
        scores, reverse = dual_softmax(scored.scores_TV), dual_softmax(scored.scores_TV.mT).mT
    metrics = evaluate_scores(scores, scored.video_of_text, protocol=protocol, video_to_text_scores=reverse)
    result = evaluation_result(
        metrics,
        dataset=source.manifest.header.name,
        split=split,
        selected_on=selected_on,
        seed=seed,
        rescoring=rescoring,
        config_fingerprint=model.config.fingerprint,
        weights_hash=weights_hash(model),
        queries_hash=hash_queries(scored.captions, scored.video_ids),
        num_missing_videos=missing,
    )
    return result, scored


def weights_hash(model: GARE) -> str:
    """Twelve hex digits of every weight, whatever device it is on."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def read_selection(folder: Path) -> tuple[str | None, int | None]:
    """The split and seed that chose a trained model, as noted beside it; (None, None) if unknown."""
    try:
        noted = json.loads((folder / "selection.json").read_text())
        return str(noted["selected_on"]), int(noted["seed"])
    except (OSError, ValueError, KeyError):
        return None, None
