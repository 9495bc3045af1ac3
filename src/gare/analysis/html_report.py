"""One HTML file that opens offline: claims, data card, settings, every picture with caption and numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from gare.analysis.analysis_run import Analysis, JudgedClaim, Section
from gare.analysis.presentation import Picture, Table
from gare.atomic import write_text
from gare.evaluate.model_evaluation import weights_hash
from gare.version import __version__

REPORT_FILE = "report.html"


def write_report(analysis: Analysis, *, title: str, file: str = REPORT_FILE) -> Path:
    """Write a page into the analysis' folder; with the report itself, claims.json."""
    path = analysis.folder / file
    write_text(path, html_report(analysis, title=title))
    if file != REPORT_FILE:
        return path
    claims = [
        {"claim": c.says, "verdict": c.verdict, "measured": c.measured, "rule": c.rule, "probe": c.section}
        for c in analysis.claims
    ]
    write_text(analysis.folder / "claims.json", json.dumps(claims, indent=1, ensure_ascii=False) + "\n")
    return path


def html_report(analysis: Analysis, *, title: str) -> str:
    """The whole page as a string."""
    css = files("gare.analysis").joinpath("report.css").read_text(encoding="utf-8")
    parts = [
        _contents(analysis),
        "<main>",
        _header(analysis, title),
        _claims(analysis.claims),
        _data_card(analysis),
        *(_section(part, analysis.folder) for part in analysis.sections),
        _config(analysis),
        "</main>",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n"
        f'<body>\n<div class="page">\n{body}\n</div>\n</body>\n</html>\n'
    )


def _contents(analysis: Analysis) -> str:
    lines = ['<li><a href="#claims">Claims of the paper</a></li>', '<li><a href="#data">Data card</a></li>']
    for part in analysis.sections:
        empty = ' class="none"' if part.numbers is None else ""
        lines.append(f'<li><a{empty} href="#{part.name}">{escape(part.probe.title)}</a></li>')
    lines.append('<li><a href="#config">Settings</a></li>')
    return f"<nav><b>Contents</b><ol>{''.join(lines)}</ol></nav>"


def _header(analysis: Analysis, title: str) -> str:
    study = analysis.study
    compared = "no baseline given"
    if study.baseline is not None:
        compared = f"baseline {weights_hash(study.baseline.model)}"
    model = f"model {weights_hash(study.subject.model)}"
    return (
        f'<header id="top"><h1>{escape(title)}</h1><p class="lead">{escape(model)}, {escape(compared)}; '
        f"{len(study.gallery.videos):,} videos of split {escape(study.gallery.split)}; gare "
        f"{escape(__version__)}. t is the vector of a text, v that of a video, Δ the increment of a "
        "pair; a pair <em>matches</em> when the text was written for the video.</p></header>"
    )


def _claims(claims: Sequence[JudgedClaim]) -> str:
    rows = []
    for claim in claims:
        kind = {True: "yes", False: "no", None: "unknown"}[claim.holds]
        rows.append(
            f'<tr><td><a href="#{claim.section}">{escape(claim.says)}</a><br>'
            f'<span class="rule">{escape(claim.rule)}</span></td>'
            f'<td class="verdict {kind}">{claim.verdict}</td><td>{escape(claim.measured)}</td></tr>'
        )
    return (
        '<h2 id="claims">Claims of the paper</h2><p>Each line is judged by the rule beneath it on this model '
        "and these data, which are not the paper's.</p>"
        '<div class="scroll" tabindex="0"><table>'
        "<tr><th>The paper says</th><th>Here</th><th>Measured</th></tr>"
        f"{''.join(rows)}</table></div>"
    )


def _data_card(analysis: Analysis) -> str:
    study = analysis.study
    manifest = study.gallery.source.manifest
    words = [len(caption.split()) for caption in study.gallery.captions]
    counts = "; ".join(f"{split}: {count}" for split, count in manifest.counts.items())
    real = study.subject.video.mask_VF.sum(dim=1)
    facts = {
        "Dataset": manifest.header.name,
        "Protocol": manifest.header.protocol or "not named",
        "Everything in the manifest": counts,
        "Used here": f"split {study.gallery.split}, {len(study.gallery.videos):,} videos, the first caption "
        "of each",
        "Videos left out, no frames": str(len(study.gallery.source.missing)),
        "Frames a video": f"{study.gallery.source.num_frames} asked for, {int(real.min())} to "
        f"{int(real.max())} found",
        "Words a caption": f"{min(words)} to {max(words)}, mean {sum(words) / len(words):.1f}",
        "Fingerprint": study.gallery.fingerprint,
    }
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts.items())
    return f'<h2 id="data">Data card</h2><div class="scroll" tabindex="0"><table>{rows}</table></div>'


def _section(part: Section, folder: Path) -> str:
    head = f'<h2 id="{part.name}">{escape(part.probe.title)}</h2><p>{_code(part.probe.intro)}</p>'
    if part.numbers is None:
        return f'{head}<p class="missing">{_code(part.reason)}</p>'
    files_ = [f"numbers/{part.name}.json"]
    files_ += [f"numbers/{part.name}.{table}.parquet" for table in sorted(part.numbers.tables)]
    figures = "".join(_figure(picture, folder, files_[0]) for picture in part.pictures)
    links = ", ".join(f'<a href="{name}">{name.removeprefix("numbers/")}</a>' for name in files_)
    return (
        f'{head}<div class="figures">{figures}</div>{"".join(map(_table, part.tables))}'
        f'<p class="soft">Numbers: {links}</p>'
    )


def _table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if place >= table.text_columns else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in table.rows)
    head = f"<tr>{line(table.header, 'th')}</tr>"
    note = f'<p class="soft">{_code(table.note)}</p>' if table.note else ""
    return (
        f"<h3>{escape(table.title)}</h3><div class=scroll tabindex=0><table>{head}{body}</table></div>{note}"
    )


def _figure(picture: Picture, folder: Path, numbers: str) -> str:
    # Photographs are smaller as pixels; drawings are sharper as vectors.
    kind, mime = ("png", "image/png") if picture.wide else ("svg", "image/svg+xml")
    data = base64.b64encode((folder / "figures" / f"{picture.name}.{kind}").read_bytes()).decode()
    links = " ".join(
        f'<a href="figures/{picture.name}.{ext}">{ext.upper()}</a>' for ext in ("pdf", "svg", "png")
    )
    wide = ' class="wide"' if picture.wide else ""
    return (
        f'<figure{wide} id="{picture.name}"><img src="data:{mime};base64,{data}" '
        f'alt="{escape(picture.caption)}"><figcaption>{_code(picture.caption)}'
        f'<span class="links">{links} · <a href="{numbers}">numbers</a></span></figcaption></figure>'
    )


def _config(analysis: Analysis) -> str:
    study = analysis.study
    blocks = [("Model", study.subject.model.config.to_values())]
    if study.baseline is not None:
        blocks.append(("Baseline", study.baseline.model.config.to_values()))
    shown = [(name, json.dumps(values, indent=2, ensure_ascii=False)) for name, values in blocks]
    if study.run is not None and (study.run / "config.toml").is_file():
        shown.append(("Training run", (study.run / "config.toml").read_text(encoding="utf-8")))
    details = "".join(
        f'<details><summary>{name}</summary><pre tabindex="0">{escape(text)}</pre></details>'
        for name, text in shown
    )
    return f'<h2 id="config">Settings</h2>{details}'


def _code(text: str) -> str:
    """Text escaped for HTML, with `…` as code."""
    pieces = escape(text, quote=False).split("`")
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))
