"""The real import graph has no cycle and points one way; heavy libraries are imported where they are used.

Every import counts, also one inside a function. Only `if TYPE_CHECKING:` never runs and is left out. A
package is a folder of modules (`library.store` is one of its own), a module directly in `gare` stands for
itself, and `gare` is its public face, `__init__.py`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import gare

SOURCE = Path(gare.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# From left to right, as in docs/architecture.md: a part imports its own tier and those that follow.
TIERS = [
    {"__main__"},
    {"cli"},
    {"serve", "bench", "integrations"},
    {"cluster"},
    {"analysis"},
    {"train"},
    {"library"},
    {"evaluate"},
    {"model"},
    {"encoders", "interaction", "data", "objective", "theory"},
    {
        "types",
        "errors",
        "settings",
        "extras",
        "image_fit",
        "cpu_products",
        "interrupts",
        "registry",
        "atomic",
        "cache_folder",
        "version",
    },
]
TIER_OF = {name: tier for tier, names in enumerate(TIERS) for name in names}


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node, but for what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            children = child.orelse
        else:
            children = [child]
        for each in children:
            yield each
            yield from running_code(each)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names a module imports, submodules named in `from package import module` included."""
    for node in running_code(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (part.value for part in node.args[:1] if isinstance(part, ast.Constant))


def package_of(path: Path) -> str:
    """The package a file of gare belongs to: its folder, or itself where that is gare."""
    folder = path.relative_to(SOURCE).parent
    if folder.parts:
        return ".".join(folder.parts)
    return "gare" if path.stem == "__init__" else path.stem


def find_file(name: str) -> Path:
    """The file that `import name` runs; the last part may be something inside a module."""
    place = SOURCE.joinpath(*name.split(".")[1:])
    while not (place / "__init__.py").is_file():
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        place = place.parent
    return place / "__init__.py"


def import_graph() -> dict[str, dict[str, set[str]]]:
    """Package → package it imports → the files that do."""
    graph: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in FILES:
        here = package_of(path)
        names = list(imported_modules(ast.parse(path.read_text(encoding="utf-8"))))
        if here == "gare":
            names += gare._MODULES.values()  # imported when one of its names is asked for
        for name in names:
            if name.split(".")[0] == "gare" and (there := package_of(find_file(name))) != here:
                graph[here][there].add(str(path.relative_to(SOURCE)))
    return graph


def reachable(graph: dict[str, dict[str, set[str]]], start: str) -> set[str]:
    """All packages that importing one of them may load."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for there in graph.get(waiting.pop(), {}):
            if there not in found:
                found.add(there)
                waiting.append(there)
    return found


def test_no_package_is_in_a_cycle():
    graph = import_graph()
    in_a_cycle = [
        f"{here} → {there} ({', '.join(sorted(files))})"
        for here, found in graph.items()
        for there, files in found.items()
        if here in reachable(graph, there)
    ]
    assert in_a_cycle == []


def test_imports_point_one_way():
    wrong = [
        f"{', '.join(sorted(files))}: {here} imports {there}"
        for here, found in import_graph().items()
        for there, files in found.items()
        if "gare" not in (here, there) and TIER_OF[there.split(".")[0]] < TIER_OF[here.split(".")[0]]
    ]
    assert wrong == []


def test_every_part_has_a_place_in_the_tiers():
    assert {package_of(path).split(".")[0] for path in FILES} - {"gare"} <= TIER_OF.keys()


def test_a_lazy_import_counts_and_one_for_type_checkers_does_not():
    code = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from c import d\n"
    assert list(imported_modules(ast.parse(code))) == ["b", "c.d"]


def test_a_file_name_stands_once_in_the_tree():
    places = defaultdict(list)
    for path in FILES:
        if path.stem not in ("__init__", "__main__"):
            places[path.name].append(str(path.relative_to(SOURCE)))
    assert [found for found in places.values() if len(found) > 1] == []


def test_importing_gare_needs_no_decoder_and_no_triton():
    """As on a GPU machine without PyAV, or a CPU machine without Triton."""
    code = (
        "import sys\n"
        "for name in ('av', 'triton', 'lancedb', 'fastapi', 'torchvision'): sys.modules[name] = None\n"
        "import gare, gare.cli.main, gare.data.video, gare.model\n"
        "assert 'transformers.models.clip' not in sys.modules\n"
        "import torch\n"
        "model = gare.GARE(gare.GareConfig.load({'encoder': {'name': 'tiny'}})).eval()\n"
        "video = gare.VideoFeatures(torch.randn(2, 3, 16), torch.ones(2, 3, dtype=torch.bool))\n"
        "print(model.score(model.encode_text(['a']), video).shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "torch.Size([1, 2])\n", result.stderr
