"""Seeded damage to text files: what a slip of the hand, a bad merge or malice makes of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

JUNK = (
    "",
    "null",
    "~",
    "NaN",
    ".nan",
    ".inf",
    "-1",
    "0",
    "-0.0",
    "1e400",
    "1" * 31,
    "0x10",
    "1_000",
    "true",
    "2026-01-01",
    "80",
    "80 GiB",
    "-5 us",
    "80 parsecs",
    "!!python/object/apply:os.system [id]",
    "!!binary aGk=",
    "*missing",
    "&a [*a]",
    "&b {<<: *b}",
    "{",
    "[",
    "]",
    "{a: {a: {a: 1}}}",
    "[1, 2, 3]",
    "- x",
    "'",
    '"',
    "|",
    ">",
    "%",
    "@",
    "---",
    "...",
    "a: b: c",
    "\t",
    "\x00",
    "\x07",
    "\u202e",
    "\U0001f600",
    "\ufeff",
    "é",
    "x" * 5000,
    "n[1-99999999999]",
    "n[1-1000000]",
    "n[5-1]",
    "n[",
    "../../../../etc/passwd",
    "/dev/zero",
    ".",
)
TOKEN = re.compile(r"[^\s,:{}\[\]]+")

Mutation = Callable[[random.Random, str], str]


def _drop_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return "".join(lines)


def _double_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines)), lines[i])
    return "".join(lines)


def _swap_lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


def _indent(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    lines[i] = rng.choice((" ", "  ", "\t", "- ")) + lines[i]
    return "".join(lines)


def _truncate(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text))]


def _replace_token(rng: random.Random, text: str) -> str:
    found = rng.choice(list(TOKEN.finditer(text)))
    return text[: found.start()] + rng.choice(JUNK) + text[found.end() :]


def _swap_tokens(rng: random.Random, text: str) -> str:
    tokens = list(TOKEN.finditer(text))
    a, b = sorted(rng.sample(tokens, 2), key=lambda token: token.start())
    return text[: a.start()] + b.group() + text[a.end() : b.start()] + a.group() + text[b.end() :]


def _misspell(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text) - 1)
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def _change_digit(rng: random.Random, text: str) -> str:
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    i = rng.choice(digits)
    return text[:i] + rng.choice("0123456789") * rng.choice((1, 1, 1, 2, 40)) + text[i + 1 :]


def _insert(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return text[:i] + rng.choice(JUNK) + text[i:]


def _drop_span(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text))
    return text[:i] + text[i + rng.randrange(1, 40) :]


MUTATIONS: tuple[Mutation, ...] = (
    _drop_line,
    _double_line,
    _swap_lines,
    _indent,
    _truncate,
    _replace_token,
    _replace_token,
    _replace_token,
    _swap_tokens,
    _misspell,
    _change_digit,
    _change_digit,
    _insert,
    _drop_span,
)


def mutated(text: str, seed: int) -> str:
    """`text` with one to three kinds of damage, always the same for a seed."""
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(TOKEN.findall(text)) > 2 and any(c.isdigit() for c in text):
            text = rng.choice(MUTATIONS)(rng, text)
    return text
