"""The one vector of a video that finds candidates: an inner product that approximates the GARE score.

The score of a text t is (t + Δ)·v / (|t + Δ| |v|). Increments of a video differ little from text to text (by
a few thousandths of their length), so Δ is replaced by its average over everyday sentences, |t| / |t + Δ| by
its average too, and v by the mean frame. What is left is linear in the unit text u = t / |t|: a slope
w = v / |v| times that ratio, and a constant c that makes the average score of those sentences come out
exactly. So (u, 1)·(w, c) ≈ score. For a dual encoder with mean pooling c is zero and the two are equal.

One half of the sentences below makes these vectors, the other half checks them (`stage1_audit`). They need
not match a library: an increment differs little from text to text, so their average stands for all.

Shapes: T texts, V videos, F frames, D embedding, E = D + 1.
"""

from __future__ import annotations

import json
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.library.store import Store
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

DEFAULT_CANDIDATES = 256
AUDIT_NOTE = "audit"
"""The name of the note in which a library keeps its last audit."""
_TEXTS: WeakKeyDictionary[GARE, TextFeatures] = WeakKeyDictionary()
_VIDEOS_AT_ONCE = 256  # T × V × D numbers: 12 MB


def stage1_queries(text_TD: Tensor) -> Tensor:
    """The query side of the product, [T, D + 1]."""
    return torch.cat([F.normalize(text_TD, dim=-1), text_TD.new_ones(len(text_TD), 1)], dim=-1)


@torch.no_grad()
def stage1_vectors(model: GARE, video: VideoFeatures) -> Tensor:
    """The video side of the product, [V, D + 1]: what an index stores and searches."""
    if model not in _TEXTS:
        _TEXTS[model] = model.encode_text(STAGE1_SENTENCES)
    text = _TEXTS[model].to(video.frames_VFD.device)
    return torch.cat([_linear_scores(model, text, block) for block in video.blocks(_VIDEOS_AT_ONCE)])


def plain_vectors(video: VideoFeatures) -> Tensor:
    """The stage-1 vectors of a plain dual encoder: the mean frame at length one, and a zero."""
    unit_VD = unit_means(video)
    return torch.cat([unit_VD, unit_VD.new_zeros(len(video), 1)], dim=-1)


def unit_means(video: VideoFeatures) -> Tensor:
    """The mean frame of each video at length one, [V, D]."""
    return F.normalize(video.mean(), dim=-1)


def recommended_candidates(store: Store) -> int:
    """How many candidates the last audit recommends; 256 without one, or once the library has outgrown it."""
    note = store.get_notes().get(AUDIT_NOTE)
    if note is None:
        return DEFAULT_CANDIDATES
    audit = json.loads(note)
    candidates = int(audit["candidates"])
    is_outgrown = candidates < DEFAULT_CANDIDATES and store.count() > 2 * audit["num_items"]
    return DEFAULT_CANDIDATES if is_outgrown else candidates


def _linear_scores(model: GARE, text: TextFeatures, video: VideoFeatures) -> Tensor:
    slope_VD = model.interaction.stage1_slope(text, video)
    average_V = model.score(text, video).mean(dim=0)
    constant_V = average_V - slope_VD @ F.normalize(text.text_TD, dim=-1).mean(dim=0)
    return torch.cat([slope_VD, constant_V[:, None]], dim=-1)


_SENTENCES = """
a dog catches a ball in the park
a woman is cooking vegetables in a kitchen
children playing on a beach
a man plays the guitar and sings
a car drives along a road at night
people dancing at a party
a cat sleeping on a sofa
a football match in a stadium
a cartoon character talks to another one
someone shows how to use a computer program
a person rides a bicycle down a hill
a bird sits on the branch of a tree
two men are talking in a television studio
a girl blows out the candles of a birthday cake
waves breaking on the rocks
a train arrives at the station
a man explains a mathematical problem on a board
a baby laughs
a band performs on a stage in front of a crowd
snow falling in the mountains
a woman puts on make-up
a runner crosses the finish line
a boat on a lake at sunset
hands folding a piece of paper
a video game with soldiers shooting
a horse gallops across a field
a chef puts a dish on the table
a crowd walks across a busy street
an aeroplane takes off
a teacher speaks to a class
fish swimming under water
a swimmer jumps into the pool
the skyline of a city
a man repairs the engine of a car
a wedding couple kisses
fireworks over a river
someone paints a picture
a skateboarder falls off his board
an interview with a politician
flowers in a garden
a child reads a book in bed
a monkey eats a banana
rain on a window
a wrestler throws his opponent
people sitting around a camp fire
a close-up of a face
a motorcycle race
a grandmother knits a scarf
""".strip().splitlines()

STAGE1_SENTENCES: tuple[str, ...] = tuple(_SENTENCES[::2])
AUDIT_SENTENCES: tuple[str, ...] = tuple(_SENTENCES[1::2])
