"""Tables of the report that say more than a picture would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from gare.analysis.figures.text import number, percent
from gare.analysis.store import Numbers

MODULES = {
    "visual": "image tower",
    "text": "text tower",
    "temporal": "temporal",
    "psi": "psi, dense, all pairs",
    "pooling": "pooling",
}


def section_tables(probe: str, numbers: Numbers) -> str:
    """What a section shows below its pictures; nothing for most."""
    make = TABLES.get(probe)
    return "" if make is None else make(numbers)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """HTML; all columns but the first few are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if place >= text_columns else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<tr>{line(header, 'th')}</tr>"
    return f"<h3>{escape(title)}</h3><div class=scroll tabindex=0><table>{head}{body}</table></div>"


def _geometry(numbers: Numbers) -> str:
    values = numbers.values
    names = {
        "baseline": values.get("baseline_label", "baseline"),
        "model": "this model, t and v",
        "shifted": "this model, with Δ",
    }
    rows = [
        [
            names[key],
            number(space["alignment"]),
            number(space["left_uniformity"]),
            number(space["right_uniformity"]),
            number(space["centroid_distance"]),
            percent(space["separability"]),
        ]
        for key, space in values["space"].items()
    ]
    rows.sort(key=lambda row: list(names.values()).index(row[0]))
    header = ["", "alignment", "uniformity, texts", "uniformity, videos", "centroid distance", "told apart"]
    spaces = table("How texts and videos share the unit sphere", header, rows)
    note = (
        '<p class="soft">Alignment: mean squared distance of matching unit vectors, 0 is perfect. Uniformity '
        "is log mean exp(−2d²), lower is more evenly spread. Centroid distance is the modality gap; “told "
        "apart” is the accuracy of a linear classifier on unseen vectors, 50 % is chance. Videos are mean "
        "frame vectors; Δ is that of the matching pair.</p>"
    )
    found = values["retrieval"]
    recalls = [
        [
            values.get("baseline_label", "baseline") if role == "baseline" else "this model",
            *(percent(found[role][f"recall_at_{k}"]) for k in (1, 5, 10)),
        ]
        for role in ("baseline", "model")
        if role in found
    ]
    return spaces + note + table("Retrieval, text→video, first captions", ["", "R@1", "R@5", "R@10"], recalls)


def _efficiency(numbers: Numbers) -> str:
    values = numbers.values
    paper = table(
        f"CLIP ViT-B/32, batch {values['batch']} × {values['frames']} frames, 10⁹ operations",
        ["module", "the paper's number counts", "MAC", "FLOP", "paper"],
        [
            [
                row["module"],
                row["note"],
                *(f"{row[key]:,.2f}" for key in ("gmac", "gflop", "paper")),
            ]
            for row in values["paper"]
        ],
        text_columns=2,
    )
    roles = list(values["flops"])
    modules = [name for name in MODULES if any(name in values["flops"][role] for role in roles)]
    flops = table(
        f"The models of this report, batch {values['batch']} × {values['frames']} frames, GFLOP",
        ["module", *roles],
        [
            [MODULES[name], *(_maybe(values["flops"][role].get(name), 1e-9) for role in roles)]
            for name in modules
        ],
    )
    parts = sorted({name for role in roles for name in values["parameters"][role]})
    parameters = table(
        "Parameters",
        ["module", *roles],
        [[name, *(_count(values["parameters"][role].get(name)) for role in roles)] for name in parts]
        + [["all", *(_count(sum(values["parameters"][role].values())) for role in roles)]],
    )
    return paper + flops + parameters + _costs(values, roles)


def _costs(values: dict[str, Any], roles: Sequence[str]) -> str:
    calls = list(dict.fromkeys(name.split("/", 1)[1] for name in values["costs"]))
    texts, videos = values["pairs_scored"]
    pairs = min(values["timed_pairs"], texts)
    sizes = {"score, factored": f", {texts} × {videos} pairs", "score, dense": f", {pairs} × {pairs} pairs"}
    rows = []
    for call in calls:
        cells = [call + sizes.get(call, "")]
        for role in roles:
            cost = values["costs"][f"{role}/{call}"]
            cells += [number(cost["milliseconds"], 1), number(cost["peak_mb"], 1)]
        rows.append(cells)
    header = ["", *(f"{role}, {unit}" for role in roles for unit in ("ms", "MB"))]
    return table(f"Time (median) and peak memory of tensors, {values['device']}", header, rows)


def _hard_negatives(numbers: Numbers) -> str:
    found = numbers.tables["false_negatives"]
    if not found["video_a"]:
        return ""
    rows = [
        [
            f"{found['video_a'][n]}: {found['caption_a'][n]}",
            f"{found['video_b'][n]}: {found['caption_b'][n]}",
            number(found["evidence"][n], 1),
            number(found["score"][n], 2),
            number(found["caption_likeness"][n], 2),
            number(found["video_likeness"][n], 2),
            "yes" if found["confused"][n] else "no",
        ]
        for n in range(min(15, len(found["video_a"])))
    ]
    header = [
        "video and caption",
        "video and caption",
        "evidence (sd)",
        "score",
        "captions",
        "frames",
        "confused",
    ]
    return table("Likely false negatives, the first 15", header, rows, text_columns=2)


def _coverage(numbers: Numbers) -> str:
    rows = [
        [
            f"{curve['gallery']} videos",
            *("–" if curve[f"at_{k}"] is None else percent(curve[f"at_{k}"]) for k in (10, 50, 100)),
            str(curve["needed_for_99"] or "all"),
        ]
        for curve in numbers.values["curves"]
    ]
    return table(
        "Share of GARE's top 10 among k candidates",
        ["gallery", "k = 10", "k = 50", "k = 100", "k for 99 %"],
        rows,
    )


def _maybe(value: float | None, scale: float) -> str:
    return "–" if value is None else number(value * scale, 2)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


TABLES: dict[str, Callable[[Numbers], str]] = {
    "geometry": _geometry,
    "efficiency": _efficiency,
    "hard_negatives": _hard_negatives,
    "coverage": _coverage,
}
