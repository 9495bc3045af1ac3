"""The one vector of a video that finds candidates. Shapes: V videos, F frames, D embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.model import GARE
from gare.types import VideoFeatures


def stage1_vectors(model: GARE, video: VideoFeatures) -> Tensor:
    """[V, D + 1]: the mean of the real frames at length one, and a zero."""
    kept_VF1 = video.mask_VF[..., None].to(video.frames_VFD.dtype)
    mean_VD = (video.frames_VFD * kept_VF1).sum(dim=1) / kept_VF1.sum(dim=1)
    unit_VD = F.normalize(mean_VD, dim=-1)
    return torch.cat([unit_VD, unit_VD.new_zeros(len(video), 1)], dim=-1)
