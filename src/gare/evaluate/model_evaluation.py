"""From a model and a split to scores, metrics and provenance: every text and every video is encoded once.

Shapes: T texts, V videos, F frames, D embedding, B bank queries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gare.data.loader import FrameSource, load_gallery
from gare.data.manifest import Split
from gare.errors import EvaluationError
from gare.evaluate.caption_protocols import CaptionProtocol, evaluate_scores
from gare.evaluate.evaluation_results import EvaluationResult, check_gallery, evaluation_result, hash_queries
from gare.evaluate.rescoring import QueryBank, Rescoring, dual_softmax, querybank_norm
from gare.evaluate.score_table import ScoreTable, caption_ids, table_of_matrix
from gare.model import GARE
from gare.model.version_0_1 import first_names
from gare.types import VideoFeatures, block_slices

BANK_BLOCK = 4096


@dataclass(frozen=True)
class SplitScores:
    """Scores of every caption of a split with every video of it."""

    scores_TV: Tensor
    video_of_text: Tensor
    captions: list[str]
    video_ids: list[str]

    def table(self) -> ScoreTable:
        """The scores with ids, as files of scores hold them."""
        return table_of_matrix(
            self.scores_TV,
            video_of_text=self.video_of_text,
            text_ids=caption_ids(self.video_of_text.tolist(), self.video_ids),
            video_ids=self.video_ids,
        )


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


@torch.no_grad()
def score_split(
    model: GARE,
    source: FrameSource,
    split: Split,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    first_caption_only: bool = False,
    videos: VideoFeatures | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SplitScores:
    """Encode the split and score it in float32 on the model's device; the matrix comes back to the CPU.

    Args:
        videos: features of the gallery, if they are at hand.
        first_caption_only: one text per video.
        on_progress: called with the number of videos encoded and their total.
    """
    was_training = model.training
    model.eval()
    rows = source.manifest.videos(split)
    captions, video_of_text = source.manifest.captions(split), source.manifest.video_index(split)
    if first_caption_only:
        first = {video: text for text, video in reversed(list(enumerate(video_of_text)))}
        captions, video_of_text = [captions[first[v]] for v in range(len(rows))], list(range(len(rows)))
    if videos is None:
        videos = encode_gallery(model, source, split, batch_size, num_workers, on_progress)
    text = model.encode_text(captions)
    # Frames as a library keeps them: what is measured is what a search gives. Cosines move by about 1e-5.
    videos = videos.to(torch.float16).to(torch.float32)
    scores_TV = model.score(text.to(torch.float32), videos).cpu()
    model.train(was_training)
    return SplitScores(scores_TV, torch.tensor(video_of_text), captions, [row.video_id for row in rows])


@torch.no_grad()
def encode_gallery(
    model: GARE,
    source: FrameSource,
    split: Split,
    batch_size: int | None = None,
    num_workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> VideoFeatures:
    """Features of every video of a split, in the order of its gallery."""
    wanted = model.encoder.image_format
    batch_size = batch_size or (32 if model.device.type == "cuda" else 4)
    total = len(source.manifest.videos(split))
    parts: list[VideoFeatures] = []
    done = 0
    gallery = load_gallery(
        source,
        split,
        image_size=wanted.size,
        fit=wanted.fit,
        batch_size=batch_size,
        num_workers=num_workers,
    )
    for batch in gallery:
        parts.append(model.encode_frames(batch.pixels_VFCHW, batch.mask_VF))
        done += len(batch)
        if on_progress:
            on_progress(done, total)
    return VideoFeatures.cat(parts)


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
    """Twelve hex digits of every weight, whatever device it is on.

    Weights go by their first names, those of version 0.1, so that results of all versions can be compared.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(first_names(model.state_dict(), model.config.interaction.name).items()):
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
