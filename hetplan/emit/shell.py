"""Words and lines of shell scripts that pass `bash -n` and shellcheck."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

FILL_IN = "FILL_IN"
"""What a variable holds that only the user knows; no script starts before it is replaced."""
SOURCED = "# shellcheck shell=bash disable=SC2034,SC2154\n"
"""First line of a file that scripts read: the shell it is for; its variables come from and go to others."""
_LOUD = re.compile(r"[^A-Za-z0-9]+")


def quoted(word: object) -> str:
    """Return a value as one shell word."""
    return shlex.quote(str(word))


def variable(*parts: str) -> str:
    """Return a shell variable's name made of words: `NCCL_IB_HCA`, `A100`."""
    return "_".join(_LOUD.sub("_", part).strip("_").upper() for part in parts)


def exports(values: Mapping[str, str]) -> str:
    """Return one export a line; values are shell words already."""
    return "".join(f"export {name}={value}\n" for name, value in values.items())


def array(name: str, words: Sequence[str]) -> str:
    """Return a bash array, an option and its values on one line; words are shell words already."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and lines[-1].startswith("--"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return f"{name}=(\n" + "".join(f"    {line}\n" for line in lines) + ")\n"


def comment(text: str) -> str:
    """Return a text as comment lines."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def script(purpose: str, lines: Iterable[str]) -> str:
    """Return a bash script that stops at the first error and runs in its own folder."""
    head = f"#!/usr/bin/env bash\n{comment(purpose)}set -euo pipefail\n"
    return head + 'cd "$(dirname "${BASH_SOURCE[0]}")"\n' + "".join(f"{line}\n" for line in lines)
