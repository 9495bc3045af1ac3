"""Evaluate a model on a split: scores, metrics, provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gare.data.loader import FrameSource
from gare.data.manifest import Split
from gare.errors import EvaluationError
from gare.evaluate.protocols import CaptionProtocol, evaluate_scores
from gare.evaluate.querybank import QueryBank
from gare.evaluate.report import EvaluationResult, check_gallery, evaluation_result, hash_queries
from gare.evaluate.rescoring import Rescoring, dual_softmax, querybank_norm
from gare.evaluate.similarity import SplitScores, encode_gallery, score_split
from gare.model import GARE
from gare.types import VideoFeatures, block_slices

BANK_BLOCK = 4096


def evaluate_model(
    model: GARE,
    source: FrameSource,
    split: Split,
    *,
    selected_on: str,
    seed: int | None = None,
    protocol: CaptionProtocol = "max_caption",
    rescoring: Rescoring = "none",
    querybank: QueryBank | None = None,
    num_workers: int = 0,
    allow_missing: bool = False,
    videos: VideoFeatures | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[EvaluationResult, SplitScores]:
    """Both directions on one split, with intervals; the score matrix comes along for saving.

    Args:
        rescoring: "dsl" or "qb_norm" is a second, labelled result, in `result.rescored`.
        querybank: the queries of "qb_norm", none of them a caption of this split.
        videos: features of the gallery, if they are at hand.
    """
    _check_bank(rescoring, querybank, source.manifest.captions(split))
    expected = source.manifest.header.expected.get(split)
    found = len(source.manifest.videos(split))
    missing = check_gallery(
        expected=found if expected is None else expected.videos, found=found, allow_missing=allow_missing
    )
    was_training = model.training
    model.eval()
    if videos is None:
        videos = encode_gallery(model, source, split, num_workers=num_workers, on_progress=on_progress)
    scored = score_split(model, source, split, videos=videos)

    def measure(kind: Rescoring, scores: Tensor, reverse: Tensor) -> EvaluationResult:
        return evaluation_result(
            evaluate_scores(scores, scored.video_of_text, protocol=protocol, video_to_text_scores=reverse),
            dataset=source.manifest.header.name,
            split=split,
            selected_on=selected_on,
            seed=seed,
            rescoring=kind,
            querybank=None if querybank is None or kind == "none" else str(querybank),
            config_fingerprint=model.config.fingerprint,
            weights_hash=weights_hash(model),
            queries_hash=hash_queries(scored.captions, scored.video_ids),
            num_missing_videos=missing,
        )

    plain_TV = scored.scores_TV
    result = measure("none", plain_TV, plain_TV)
    if rescoring != "none":
        changed = _rescore(model, plain_TV, videos, querybank)
        result = replace(result, rescored=(measure(rescoring, *changed),))
    model.train(was_training)
    return result, scored


def _check_bank(rescoring: Rescoring, bank: QueryBank | None, captions: Sequence[str]) -> None:
    if (rescoring == "qb_norm") != (bank is not None):
        raise EvaluationError(
            "QB-Norm and a query bank go together: give queries of the training split with --querybank "
            "(MANIFEST, MANIFEST:SPLIT or a text file), and --rescore qbnorm"
        )
    if bank is not None:
        bank.refuse_overlap(captions)


def _rescore(
    model: GARE, scores_TV: Tensor, videos: VideoFeatures, bank: QueryBank | None
) -> tuple[Tensor, Tensor]:
    """The matrix of each direction: QB-Norm with a bank, DSL without."""
    if bank is not None:
        return querybank_norm(scores_TV, _score_bank(model, bank, videos)), scores_TV
    # Each direction has its own prior: softmax over the other queries of that direction.
    return dual_softmax(scores_TV), dual_softmax(scores_TV.mT).mT


@torch.no_grad()
def _score_bank(model: GARE, bank: QueryBank, videos: VideoFeatures) -> Tensor:
    """The bank's queries against the gallery, [B, V], a few thousand texts at a time."""
    gallery = videos.to(torch.float32)
    rows = [
        model.score(model.encode_text(bank.queries[part]).to(torch.float32), gallery).cpu()
        for part in block_slices(len(bank.queries), BANK_BLOCK)
    ]
    return torch.cat(rows)


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
