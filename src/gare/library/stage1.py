"""The one vector of a video that finds candidates: an inner product that approximates the GARE score.

The score of a text t is (t + Δ)·v / (|t + Δ| |v|). Increments of a video differ little from text to text (by
a few thousandths of their length), so Δ is replaced by its average over everyday sentences, |t| / |t + Δ| by
its average too, and v by the mean frame. What is left is linear in the unit text u = t / |t|: a slope
w = v / |v| times that ratio, and a constant c that makes the average score of those sentences come out
exactly. So (u, 1)·(w, c) ≈ score; for a dual tower with mean pooling c is zero and the product is the score.

Shapes: T texts, V videos, F frames, D embedding, E = D + 1.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.library.features import mean_frames
from gare.library.queries import STAGE1_SENTENCES
from gare.model import GARE
from gare.scoring import dense
from gare.types import TextFeatures, VideoFeatures

_TEXTS: WeakKeyDictionary[GARE, TextFeatures] = WeakKeyDictionary()
_VIDEOS_AT_ONCE = 256  # T × V × D numbers: 12 MB


def stage1_queries(text_TD: Tensor) -> Tensor:
    """[T, D + 1]: what a text is multiplied with."""
    return torch.cat([F.normalize(text_TD, dim=-1), text_TD.new_ones(len(text_TD), 1)], dim=-1)


@torch.no_grad()
def stage1_vectors(model: GARE, video: VideoFeatures) -> Tensor:
    """[V, D + 1]: what a video is found by."""
    if model not in _TEXTS:
        _TEXTS[model] = model.encode_text(STAGE1_SENTENCES)
    text = _TEXTS[model].to(video.frames_VFD.device)
    return torch.cat([_linear_scores(model, text, block) for block in video.blocks(_VIDEOS_AT_ONCE)])


def plain_vectors(video: VideoFeatures) -> Tensor:
    """The same for a plain dual tower: the mean frame at length one, and a zero."""
    unit_VD = F.normalize(mean_frames(video), dim=-1)
    return torch.cat([unit_VD, unit_VD.new_zeros(len(video), 1)], dim=-1)


def _linear_scores(model: GARE, text: TextFeatures, video: VideoFeatures) -> Tensor:
    interaction, slope_VD = model.config.interaction, F.normalize(mean_frames(video), dim=-1)
    if model.increment_net is not None:
        increment_VD = dense.increments(text, video, model.increment_net, interaction).mean(dim=0)
        if interaction.corrected_side == "video":
            slope_VD = F.normalize(mean_frames(video) + increment_VD, dim=-1)
        else:
            text_T1D = text.text_TD[:, None]
            shifted_TV = (text_T1D + increment_VD).norm(dim=-1).clamp_min(1e-8)
            slope_VD = slope_VD * (text_T1D.norm(dim=-1) / shifted_TV).mean(dim=0)[:, None]
    average_V = model.score(text, video).mean(dim=0)
    constant_V = average_V - slope_VD @ F.normalize(text.text_TD, dim=-1).mean(dim=0)
    return torch.cat([slope_VD, constant_V[:, None]], dim=-1)
