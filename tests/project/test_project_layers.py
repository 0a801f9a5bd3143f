"""Imports point down only, heavy packages are imported by the few who need them, and the command line alone prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetplan

PACKAGE = Path(hetplan.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    ("errors", "units", "__init__"),
    ("balance",),
    ("specs",),
    ("catalog",),
    ("costs",),
    ("plan",),
    ("search", "simulate", "emit", "calibrate"),
    ("report",),
    ("runtime",),
    ("profiling",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

ONLY_IMPORTERS = {
    "ortools": {"balance", "search"},
    "scipy": {"search", "calibrate", "profiling"},
    "typer": {"cli"},
    "rich": set(),
    "torch": {"profiling", "runtime"},
}


def part(path: Path) -> str:
    """The subpackage or top-level module a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""
            if node.module == "hetplan":
                yield from (f"hetplan.{alias.name}" for alias in node.names)


def hetplan_parts(path: Path) -> set[str]:
    found = {name.split(".")[1] for name in imports(path) if name.startswith("hetplan.")}
    return {name for name in found if not name.startswith("__")}


def test_every_part_has_a_layer() -> None:
    assert {part(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = part(path)
    wrong = {name for name in hetplan_parts(path) if name != own and RANK[name] >= RANK[own]}
    same_bottom = {"errors", "units"} if own in ("errors", "units") else set()
    assert not wrong - same_bottom, f"{path} imports {sorted(wrong)} from its own layer or above"


def test_no_import_cycles_between_parts() -> None:
    edges = {name: set[str]() for name in RANK}
    for path in FILES:
        edges[part(path)] |= hetplan_parts(path) - {part(path)}
    done: set[str] = set()
    while ready := {name for name in edges if name not in done and edges[name] <= done}:
        done |= ready
    assert done == edges.keys()


@pytest.mark.parametrize("package", ONLY_IMPORTERS)
def test_heavy_packages_have_one_importer(package: str) -> None:
    found = {part(path) for path in FILES if any(name.split(".")[0] == package for name in imports(path))}
    assert found <= ONLY_IMPORTERS[package]


def calls(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


SPEAKING = {"print", "input", "exit", "quit", "sys.exit", "os._exit", "os.getenv", "breakpoint"}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if part(path) not in ("cli", "runtime", "profiling")],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_only_the_command_line_talks_to_the_outside(path: Path) -> None:
    spoken = [(name, line) for name, line in calls(path) if name in SPEAKING]
    attributes = [
        (ast.unparse(node), node.lineno)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in {"sys.stdout", "sys.stderr", "sys.argv", "os.environ"}
    ]
    assert not spoken + attributes


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_assert_and_no_blind_except(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    wrong = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert):
            wrong.append((node.lineno, "assert"))
        if isinstance(node, ast.ExceptHandler) and "noqa: BLE001" not in lines[node.lineno - 1]:
            caught = ast.unparse(node.type) if node.type else "everything"
            if caught in ("everything", "Exception", "BaseException"):
                wrong.append((node.lineno, f"except {caught}"))
    assert not wrong
