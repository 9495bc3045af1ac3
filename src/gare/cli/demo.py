"""`gare demo`: the most convincing thing that exists so far, end to end."""

from __future__ import annotations

import tempfile

import torch
import typer
from rich.console import Console

from gare.bench.scoring import benchmark_scoring
from gare.cli.bench import scoring_table
from gare.config import GareConfig, ObjectiveConfig
from gare.model import GARE
from gare.objective import training_loss


def demo() -> None:
    """Build a small model, train it for a moment, save and reload it, and score it both ways.

    Example:

        gare demo
    """
    out = Console()
    torch.manual_seed(0)
    model = GARE(GareConfig.load({"backbone": {"family": "tiny", "dim": 32}, "increment": {"dropout": 0.0}}))
    texts = [f"a scene lit by colour number {i}" for i in range(8)]
    pixels = torch.rand(8, 1, 3, 1, 1).expand(8, 4, 3, 32, 32) * 2 - 1
    mask = torch.ones(8, 4, dtype=torch.bool)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    token_ids, token_mask = model.backbone.tokenize(texts)

    out.print("[bold]1.[/] A small GARE (random towers), trained on eight captions with the full objective")
    for step in range(61):
        pairs = model.score_pairs(
            model.text_features(token_ids, token_mask), model.video_features(pixels, mask)
        )
        loss = training_loss(pairs, model.logit_scale, ObjectiveConfig())
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        if step % 20 == 0:
            right = (pairs.scores_TV.argmax(dim=1) == torch.arange(8)).sum().item()
            terms = "  ".join(f"{name} {term.item():.3f}" for name, term in loss.terms.items())
            out.print(f"   step {step:3d}   {right} of 8 captions find their clip   {terms}")

    out.print("[bold]2.[/] Saved, loaded again, and scored both ways")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = GARE.from_pretrained(folder)
    with torch.no_grad():
        text, video = model.encode_text(texts), model.video_features(pixels, mask)
        difference = (model.score(text, video, method="dense") - model.score(text, video)).abs().max().item()
    out.print(f"   largest difference between dense and factored scores: {difference:.1e}")

    out.print("[bold]3.[/] The same at the size of CLIP ViT-B/32")
    result = benchmark_scoring(
        texts=64, videos=1000, frames=12, dim=512, dtype=torch.float32, device=torch.device("cpu")
    )
    out.print(scoring_table(result))
    if difference > 1e-5 or result.max_abs_difference > 1e-4:
        out.print("[bold red]dense and factored disagree[/]")
        raise typer.Exit(1)
    out.print(f"Factored scoring gives the same numbers [bold]{result.speedup:.0f}×[/] faster.")
