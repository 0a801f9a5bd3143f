"""Flags of a launch command in a shell script or a plain list of arguments.

The last value of a flag counts, as for the programs that take them. `$NAME` is replaced by what the same text assigns
(`NAME=8`, `NAME=${NAME:-8}`); a variable that is set nowhere is refused where a number is needed of it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.errors import SpecError
from hetplan.specs.importers.facts import SourceText
from hetplan.units import show

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;#(]+)", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*|\d)(?::?[-=]([^}]*))?\}?")
_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")
MOST_ITEMS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Flags by name, dashes stripped; values are the words up to the next flag."""

    source: SourceText
    values: Mapping[str, tuple[int, tuple[str, ...]]]

    def has(self, name: str) -> bool:
        """Whether the flag is given."""
        return name in self.values

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words after a flag, none where it is not given."""
        return self.values[name][1] if name in self.values else ()

    def text(self, name: str) -> str | None:
        """Return the one word after a flag.

        Raises:
            SpecError: there is none.
        """
        if name not in self.values:
            return None
        words = self.words(name)
        if not words:
            raise self.error(name, "has no value")
        return words[0]

    def integer(self, name: str, *, minimum: int = 1) -> int | None:
        """Return the whole number after a flag.

        Raises:
            SpecError: there is none, or it is too small.
        """
        text = self.text(name)
        return None if text is None else self.whole(name, text, minimum=minimum)

    def whole(self, name: str, text: str, *, minimum: int) -> int:
        """Return a word of a flag as a whole number.

        Raises:
            SpecError: it is none, or too small.
        """
        if text.startswith("$"):
            raise self.error(name, f"{show(text)} is not set in this file")
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < minimum:
            raise self.error(name, f"{show(text)} is not a whole number of at least {minimum}")
        return int(text)

    def error(self, name: str, message: str) -> SpecError:
        """Return an error at a flag."""
        line = self.values[name][0] if name in self.values else 1
        return self.source.error(f"--{name}: {message}", line)


def launch_flags(source: SourceText) -> Flags:
    """Return the flags in a text.

    Raises:
        SpecError: a quote is not closed.
    """
    known = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(source.text)}
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    current: str | None = None
    for line, text in enumerate(source.lines, 1):
        for word in _words(source, line, text):
            if re.match(r"--?[A-Za-z]", word):
                current, equals, value = word.lstrip("-").partition("=")
                found[current] = (line, (_resolved(value, known),) if equals else ())
            elif current is not None:
                found[current] = (found[current][0], (*found[current][1], _resolved(word, known)))
        if not text.rstrip().endswith("\\"):
            current = None
    return Flags(source=source, values=found)


def _words(source: SourceText, line: int, text: str) -> list[str]:
    """The words of a line, comments left out; a text in quotes or parentheses that a variable is set to is looked into.

    Raises:
        SpecError: a quote is not closed.
    """
    bare = re.sub(r"^\s*(?:export\s+)?\w+=(?=[\"'(])", "", text.rstrip().removesuffix("\\"))
    is_list = bare != text.rstrip().removesuffix("\\")
    if bare.count('"') % 2 or is_list:
        bare = bare.replace('"', " ")  # a text of flags that is set over several lines
    lexer = shlex.shlex(bare, posix=True)
    lexer.whitespace_split = True
    try:
        return [word for word in lexer if word not in ("(", ")")]
    except ValueError:
        raise source.error("a quote is not closed on this line", line) from None


def _resolved(word: str, known: Mapping[str, str]) -> str:
    """A word with variables replaced by what the text assigns to them."""
    for _ in range(8):
        replaced = _VARIABLE.sub(lambda m: known.get(m[1], m[2] if m[2] else m[0]), word)
        if replaced == word:
            break
        word = replaced
    default = _DEFAULT.fullmatch(word)
    return default[1] if default else word


def list_value(flags: Flags, name: str) -> list[object]:
    """Return a list written as Python writes it, with `*` and `+`: `[[4, 2]] * 2 + [[1]]`.

    Raises:
        SpecError: the flag is missing or is no such list.
    """
    text = " ".join(flags.words(name))
    if not text:
        raise flags.error(name, "is missing")
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise flags.error(name, f"{show(text)} is no list of whole numbers") from None
    if not isinstance(value, list):
        raise flags.error(name, f"{show(text)} is no list")
    return value


def _evaluated(node: ast.expr) -> int | list[object]:
    """The value of a list of numbers.

    Raises:
        ValueError: something else is written.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Add):
            raise ValueError("only lists are added")
        if isinstance(left, int) and isinstance(right, list):
            left, right = right, left
        if isinstance(left, list) and isinstance(right, int) and len(left) * max(right, 0) <= MOST_ITEMS:
            return left * right
    raise ValueError("not a list of numbers")
