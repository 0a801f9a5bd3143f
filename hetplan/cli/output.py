"""Everything the program says and writes: results on stdout, remarks on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, UsageError
from hetplan.units import escape

_KIND = re.compile(r"^hetplan: *([a-z-]+)/", re.MULTILINE)
"""The line by which a document says what it is."""


def show(text: str) -> None:
    """Write the result to stdout; a reader that has gone away ends the program quietly.

    What the terminal's encoding cannot say is escaped.

    Raises:
        UsageError: stdout cannot be written to.
    """
    if sys.stdout is None:
        raise UsageError("cannot write the result: stdout is closed")
    encoding = sys.stdout.encoding or "utf-8"
    line = text if text.endswith("\n") else text + "\n"
    try:
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        raise SystemExit(0) from None
    except (OSError, ValueError) as error:
        _silence(sys.stdout)
        raise UsageError(f"cannot write the result: {_reason(error)}") from error


def show_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout."""
    show(json_text(document, indent=2))


def json_text(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return a document as strict JSON: no NaN, no infinity."""
    return json.dumps(document, indent=indent, allow_nan=False)


def remark(text: str) -> None:
    """Write a line to stderr; where that leads nowhere nobody is told."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def complain(error: HetplanError | str) -> None:
    """Write an error's one line to stderr."""
    remark(f"error: {escape(' '.join(str(error).split()))}")


def _silence(stream: Any) -> None:
    """Point a broken stream at nothing, so that closing it at exit stays quiet."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def require_writable(path: Path | None) -> None:
    """Refuse a place no file can be written to before any work is done.

    Raises:
        UsageError: the path is a folder, leads nowhere, or its folder is missing or read-only.
    """
    if path is None:
        return
    mode = _mode_of(path)
    if not str(path).strip() or (mode is not None and stat.S_ISDIR(mode)):
        raise UsageError(f"cannot write {path}: it is a folder")
    folder = _target(path).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent if not path.is_symlink() else folder}")
    is_plain = mode is None or stat.S_ISREG(mode)
    if (is_plain and not os.access(folder, os.W_OK)) or (mode is not None and not os.access(path, os.W_OK)):
        raise UsageError(f"cannot write {path}: permission denied")


def _mode_of(path: Path) -> int | None:
    """Return the mode of what is at a path, None where nothing is.

    Raises:
        UsageError: the path cannot be followed (a loop of links, a name that is too long).
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from error


def _target(path: Path) -> Path:
    """Return the place a file ends at, links followed.

    Raises:
        UsageError: the links lead in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return why something could not be written, in words."""
    return getattr(error, "strerror", None) or str(error)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a file beside it, then renamed.

    A device such as `/dev/stdout`, which cannot be replaced, is written to directly. A spec or plan is replaced by one
    of its kind only: naming an input as the output loses nothing.

    Raises:
        UsageError: the file cannot be written, or is another kind of document.
    """
    mode, target = _mode_of(path), _target(path)
    if mode is not None and stat.S_ISREG(mode):
        _keep_other_kinds(path, text)
    try:
        if mode is not None and not stat.S_ISREG(mode):
            path.write_text(text, encoding="utf-8")
            return
        handle, beside = tempfile.mkstemp(prefix=".hetplan-", dir=target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(beside, _mode(target))
        os.replace(beside, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _keep_other_kinds(path: Path, text: str) -> None:
    """Refuse to replace a document that says its kind by a text of another."""
    try:
        with path.open("rb") as file:
            before = _KIND.search(file.read(65536).decode("utf-8", "replace"))
    except OSError:
        return
    now = _KIND.search(text, 0, 65536)
    if before is not None and (now is None or now[1] != before[1]):
        raise UsageError(f"cannot write {path}: it is a {before[1]} file, which this would destroy; give another name")


def _mode(path: Path) -> int:
    """Return the permissions a file at `path` has or, when new, would get."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
