"""The card of a saved model: README.md, with what it scored as a `model-index` that the hub reads.

Numbers belong to weights. A card notes the model's fingerprint with each result, and a model whose weights
have changed since leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from gare.atomic import write_text
from gare.errors import CheckpointError

if TYPE_CHECKING:
    from gare.model.gare import GARE

CARD_FILE = "README.md"
TASKS = {"text_to_video": "text-to-video-retrieval", "video_to_text": "video-to-text-retrieval"}
"""The task of each direction, as the model-index names it."""
METRICS = {
    "recall_at_1": "R@1",
    "recall_at_5": "R@5",
    "recall_at_10": "R@10",
    "recall_at_50": "R@50",
    "median_rank": "MdR",
    "mean_rank": "MnR",
}
_BEGIN, _END = "<!-- results of gare -->", "<!-- end of results -->"
_FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class CardResult:
    """What a model scored in one direction on one split."""

    dataset: str
    split: str
    direction: str
    """"text_to_video" or "video_to_text"."""
    metrics: Mapping[str, float]
    """By the names of `METRICS`; recalls are fractions."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What one must know to judge them: tie rule, protocol, which split chose the model, fingerprint."""

    @property
    def key(self) -> tuple[str, ...]:
        """Results with the same key measure the same."""
        return self.dataset, self.split, self.direction, str(self.facts.get("rescoring", "none"))


def make_card(model: GARE, results: Sequence[CardResult] = ()) -> ModelCard:
    """The card of a model with these results."""
    data = ModelCardData(
        library_name="gare",
        tags=["text-video-retrieval", "model_hub_mixin"],
        model_name=_title(model),
        eval_results=[each for result in results for each in _to_eval_results(result)] or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_body(model, results)}", ignore_metadata_errors=False)


def read_results(folder: Path) -> tuple[CardResult, ...]:
    """The results on the card of a saved model; none where there is no card, or not one of ours."""
    if not (folder / CARD_FILE).is_file():
        return ()
    try:
        data = cast(ModelCardData, _load(folder / CARD_FILE).data)
    except CheckpointError:  # somebody else's text does not keep a model from being loaded
        return ()
    found: dict[tuple[str, ...], CardResult] = {}
    for each in data.eval_results or ():
        direction = next((name for name, task in TASKS.items() if task == each.task_type), None)
        facts = each.dataset_args
        if direction and each.metric_type in METRICS and isinstance(facts, dict) and _FINGERPRINT in facts:
            result = CardResult(each.dataset_name, each.dataset_split or "", direction, {}, facts)
            result = found.setdefault(result.key, result)
            found[result.key] = CardResult(
                result.dataset,
                result.split,
                direction,
                {**result.metrics, each.metric_type: each.metric_value},
                facts,
            )
    return tuple(found.values())


def current_results(model: GARE, results: Iterable[CardResult]) -> list[CardResult]:
    """Those that the model had with the weights it has now."""
    listed = list(results)
    fingerprint = model.fingerprint() if listed else ""
    return [result for result in listed if result.facts.get(_FINGERPRINT) == fingerprint]


def merge_results(old: Iterable[CardResult], new: Iterable[CardResult]) -> list[CardResult]:
    """All results; a new one takes the place of an old one that measures the same."""
    return list({result.key: result for result in (*old, *new)}.values())


def update_card(folder: Path, model: GARE, results: Sequence[CardResult]) -> Path:
    """Write results into the card of a saved model. What somebody else wrote there stays as it is.

    Raises:
        CheckpointError: the card cannot be read or written.
    """
    path = folder / CARD_FILE
    old = _load(path) if path.exists() else None
    merged = merge_results(current_results(model, read_results(folder)), results)
    card = make_card(model, merged)
    text = str(card if old is None else _into(old, card, merged))
    try:
        write_text(path, text if text.endswith("\n") else f"{text}\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _load(path: Path) -> ModelCard:
    try:
        card: ModelCard = ModelCard.load(path)
        return card
    except Exception as error:  # whatever YAML in it makes its parser say
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path} is not a card that can be read ({reason}); mend or move it") from None


def _into(old: ModelCard, new: ModelCard, results: Sequence[CardResult]) -> ModelCard:
    """The old card with the new results: in its model-index, and where its text has a place for them."""
    data, fresh = cast(ModelCardData, old.data), cast(ModelCardData, new.data)
    theirs = [each for each in data.eval_results or () if each.task_type not in TASKS.values()]
    data.eval_results = theirs + (fresh.eval_results or [])
    data.model_name = data.model_name or fresh.model_name
    place = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    text = place.sub(lambda _: _results_text(results), old.text)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}", ignore_metadata_errors=False)


def _to_eval_results(result: CardResult) -> list[EvalResult]:
    # The hub groups by task, dataset, configuration and split: a rescored result is another configuration.
    rescoring = str(result.facts.get("rescoring", "none"))
    return [
        EvalResult(
            task_type=TASKS[result.direction],
            task_name=result.direction.replace("_", " "),
            dataset_type=re.sub(r"[^a-z0-9_-]+", "-", result.dataset.lower()).strip("-") or "dataset",
            dataset_name=result.dataset,
            dataset_split=result.split,
            dataset_config=None if rescoring == "none" else rescoring,
            dataset_args=dict(result.facts),
            metric_type=name,
            metric_name=METRICS[name],
            metric_value=round(float(value), 6),
        )
        for name, value in result.metrics.items()
    ]


def _title(model: GARE) -> str:
    return f"GARE ({model.config.encoder.name}, {model.config.interaction.name})"


def _body(model: GARE, results: Sequence[CardResult]) -> str:
    config = model.config
    number = sum(weight.numel() for weight in model.parameters())
    return f"""# {_title(model)}

Ranks videos for a text, and texts for a video. Encoder `{config.encoder.name}`, interaction
`{config.interaction.name}`, {model.dim} dimensions, {config.num_frames} frames a video, {number:,} weights.
Made by [gare](https://arxiv.org/abs/2505.12499).

```python
import gare

model = gare.GARE.from_pretrained("FOLDER OR HUB ID")
model.similarity(["a dog catches a frisbee"], ["clip.mp4"])
```

## Results

{_results_text(results)}
"""


def _results_text(results: Sequence[CardResult]) -> str:
    if not results:
        return f"{_BEGIN}\nNothing was measured with these weights.\n{_END}"
    header = ["dataset", "split", "direction", *METRICS.values(), "selected on", "queries", "rescoring"]
    rows = [
        [
            result.dataset,
            result.split,
            result.direction.replace("_to_", "→"),
            *(_shown(name, result.metrics.get(name)) for name in METRICS),
            *(str(result.facts.get(name, "")) for name in ("selected_on", "num_queries", "rescoring")),
        ]
        for result in results
    ]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    note = "Recalls in per cent; a tie counts against the model. A split that selected the model flatters it."
    return f"{_BEGIN}\n{table}\n\n{note}\n{_END}"


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value if name.startswith('recall') else value:.1f}"
