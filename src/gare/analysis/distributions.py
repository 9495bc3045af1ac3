"""A distribution in a few numbers and a histogram; a curve as its running mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.analysis.pairs import negatives, positives


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and quantiles of the numbers there are."""

    mean: float
    std: float
    low: float
    """The 5th percentile."""
    median: float
    high: float
    """The 95th percentile."""

    @classmethod
    def of(cls, values: Tensor) -> Spread:
        """Values that are not numbers are left out.

        >>> Spread.of(torch.tensor([1.0, 3.0, float("nan")]))
        Spread(mean=2.0, std=1.0, low=1.1, median=2.0, high=2.9)
        """
        values = values[values.isfinite()].flatten().double()
        if not len(values):
            return cls(*[float("nan")] * 5)
        at = [_quantile(values, q) for q in (0.05, 0.5, 0.95)]
        return cls(float(values.mean()), float(values.std(correction=0)), *(round(x, 12) for x in at))


@dataclass(frozen=True)
class PairSpread:
    """The same quantity over matching pairs and over all others."""

    positive: Spread
    negative: Spread

    @classmethod
    def of(cls, values_TV: Tensor) -> PairSpread:
        """The spread of the diagonal, and that of everything else."""
        return cls(Spread.of(positives(values_TV)), Spread.of(negatives(values_TV)))


@dataclass(frozen=True)
class Paired:
    """Two numbers of the same items: how they differ on average, and for how many the first is larger."""

    first: float
    second: float
    difference: float
    first_is_larger: float

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Paired:
        """Compare two columns item by item.

        >>> Paired.of(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]))
        Paired(first=3.0, second=2.0, difference=1.0, first_is_larger=0.5)
        """
        return cls(
            float(first.mean()),
            float(second.mean()),
            float((first - second).mean()),
            float((first > second).double().mean()),
        )


def histograms(columns: dict[str, Tensor], bins: int = 60) -> dict[str, Tensor]:
    """Densities over shared bins: `edge` is the left end of each bin, then one column for each name.

    Without a single number (angles where no pair has an increment) all are zero.
    """
    kept = {name: values[values.isfinite()].flatten().double() for name, values in columns.items()}
    everything = torch.cat(list(kept.values()))
    low, high = (float(everything.min()), float(everything.max())) if len(everything) else (0.0, 1.0)
    if not high > low:
        low, high = low - 0.5, low + 0.5
    width = (high - low) / bins
    edges = low + width * torch.arange(bins, dtype=torch.float64)
    table = {"edge": edges, "width": torch.full_like(edges, width)}
    for name, values in kept.items():
        table[name] = torch.histc(values, bins, low, high) / max(1, len(values)) / width
    return table


def smooth(values: Tensor, width: int) -> Tensor:
    """Running mean over `width` values, shorter at the ends, so that the length stays.

    >>> smooth(torch.tensor([0.0, 3.0, 0.0, 3.0]), 3)
    tensor([1.5000, 1.0000, 2.0000, 1.5000])
    """
    half = max(0, (width - 1) // 2)
    return torch.stack([values[max(0, n - half) : n + half + 1].mean() for n in range(len(values))])


def _quantile(values: Tensor, q: float) -> float:
    """torch.quantile refuses more than 16 million numbers; a sort does not."""
    ordered = values.sort().values
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
