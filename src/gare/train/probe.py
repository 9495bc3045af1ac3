"""What `gare train --probe` records: geometry and steps of increments every few steps, in probe.jsonl.

It looks at a batch before and after the update, without dropout and without gradients, and leaves model,
optimiser and random numbers as they were: a run with a probe ends with the same weights as one without.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from gare.analysis.dynamics import PROBE_FILE, describe_step
from gare.analysis.pairs import PairVectors, pair_vectors
from gare.model import GARE
from gare.objective import Loss
from gare.train.step import Encode, PairBatch
from gare.types import TextFeatures, VideoFeatures

MAX_PAIRS = 64
"""Of a batch, so that T × V × D float64 numbers stay at 17 MB for D = 512."""
NUM_RECORDS = 100
"""Of a whole run, when no distance between records is asked for."""


class Probe:
    """Call `before` and `after` around each update; most calls do nothing."""

    def __init__(
        self, folder: Path, model: GARE, encode: Encode, *, num_steps: int, step: int, every: int
    ) -> None:
        self._model, self._encode = model, encode
        self._every = every or max(1, math.ceil(num_steps / NUM_RECORDS))
        self._path = folder / PROBE_FILE
        self._seen: tuple[PairBatch, PairVectors, float] | None = None
        kept = [line for line in _whole_lines(self._path) if json.loads(line)["step"] < step]
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def before(self, step: int, batch: PairBatch) -> None:
        if step % self._every == 0:
            part = batch[: 2 * MAX_PAIRS]
            temperature = 1 / float(self._model.logit_scale.detach())  # now: the update may change it
            self._seen = (part, self._look(part), temperature)

    def after(self, step: int, loss: Loss) -> None:
        if self._seen is None:
            return
        part, vectors, temperature = self._seen
        self._seen = None
        record: dict[str, float] = {"step": step}
        record |= {f"term/{name}": float(term) for name, term in loss.terms.items()}
        record |= describe_step(vectors, self._look(part), temperature=temperature)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: x for name, x in record.items() if math.isfinite(x)}) + "\n")

    @torch.no_grad()
    def _look(self, batch: PairBatch) -> PairVectors:
        self._model.eval()
        text, video = self._encode(batch)
        self._model.train()
        rows = _one_of_each(batch.video_index)
        return pair_vectors(
            self._model,
            TextFeatures(text.text_TD[rows], text.words_TWD[rows], text.mask_TW[rows]),
            VideoFeatures(video.frames_VFD[rows], video.mask_VF[rows]),
        )


def _one_of_each(video_index: torch.Tensor) -> list[int]:
    """The first pair of each video: a second caption of it would be a negative that is none."""
    first: dict[int, int] = {}
    for row, video in enumerate(video_index.tolist()):
        first.setdefault(video, row)
    return sorted(first.values())[:MAX_PAIRS]


def _whole_lines(path: Path) -> list[str]:
    """A kill may have cut off the last line."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line]
