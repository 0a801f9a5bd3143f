"""Sizes and names the style promises: what the linters cannot measure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetplan

PACKAGE = Path(hetplan.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parents[2]

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 50

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def body_lines(function: Function) -> int:
    """Lines of a function after its docstring, signature left out."""
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1:
        body = body[1:]
    return (function.end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    long = [(f.name, body_lines(f)) for f in functions(path) if body_lines(f) > MOST_LINES_A_FUNCTION]
    assert num_lines <= MOST_LINES_A_FILE
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_drawer_names(path: Path) -> None:
    assert not {"utils", "util", "common", "helpers", "helper", "manager", "misc"} & set(
        path.relative_to(PACKAGE).with_suffix("").parts
    )


def test_test_modules_have_different_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def record_decorator(node: ast.ClassDef) -> ast.expr | None:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(target) in ("dataclass", "dataclasses.dataclass"):
            return decorator
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_records_are_frozen(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    loose = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        decorator = record_decorator(node) if isinstance(node, ast.ClassDef) else None
        if decorator is None or node.name.startswith("_") or "# mutable:" in lines[decorator.lineno - 1]:
            continue
        words = {k.arg for k in decorator.keywords} if isinstance(decorator, ast.Call) else set()
        if not {"frozen", "slots", "kw_only"} <= words:
            loose.append((node.name, node.lineno))
    assert not loose
