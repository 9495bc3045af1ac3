"""Imports point one way, and heavy libraries are imported only where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gare

SOURCE = Path(gare.__file__).parent
# cli, serve → train, evaluate, analysis, library, bench → model, data → scoring, objective, theory → rest.
TIERS = [
    {"types", "errors", "settings", "config", "interrupts"},
    {"scoring", "objective", "theory"},
    {"model", "data"},
    {"train", "evaluate", "analysis", "library", "bench"},
    {"serve", "cli"},
]
TIER_OF = {name: tier for tier, names in enumerate(TIERS) for name in names}


def imported_parts(path: Path) -> set[str]:
    """The top-level parts of gare a file imports, wherever in the file."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "gare":
            names = [f"gare.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("gare.")}
    return parts & TIER_OF.keys()


def test_imports_point_one_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        for other in imported_parts(path) - {part}:
            if TIER_OF[other] > TIER_OF[part]:
                wrong.append(f"{path.relative_to(SOURCE)} imports gare.{other}")
    assert wrong == []


def test_every_part_has_a_place_in_the_tiers():
    parts = {
        path.name.removesuffix(".py")
        for path in SOURCE.iterdir()
        if not path.name.startswith(("_", "py.typed"))
    }
    assert parts <= TIER_OF.keys()


def test_importing_gare_needs_no_decoder_and_no_triton():
    """As on a GPU machine without PyAV, or a CPU machine without Triton."""
    code = (
        "import sys\n"
        "for name in ('av', 'triton', 'lancedb', 'fastapi', 'torchvision'): sys.modules[name] = None\n"
        "import gare, gare.cli.main, gare.data.video\n"
        "assert 'transformers.models.clip' not in sys.modules\n"
        "import torch\n"
        "model = gare.GARE(gare.GareConfig.load({'backbone': {'family': 'tiny'}})).eval()\n"
        "video = gare.VideoFeatures(torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.bool))\n"
        "print(model.score(model.encode_text(['a']), video).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "torch.Size([1, 2])\n", result.stderr
