"""Everything the program says and writes: results on stdout, remarks on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, UsageError
from hetplan.units import escape


def show(text: str) -> None:
    """Write the result to stdout; a reader that has gone away ends the program quietly.

    What the terminal's encoding cannot say is escaped.

    Raises:
        UsageError: stdout cannot be written to.
    """
    encoding = sys.stdout.encoding or "utf-8"
    line = text if text.endswith("\n") else text + "\n"
    try:
        sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
        raise SystemExit(0) from None
    except OSError as error:
        _silence(sys.stdout)
        raise UsageError(f"cannot write the result: {error.strerror or error}") from error


def show_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout."""
    show(json_text(document, indent=2))


def json_text(document: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Return a document as strict JSON: no NaN, no infinity."""
    return json.dumps(document, indent=indent, allow_nan=False)


def remark(text: str) -> None:
    """Write a line to stderr."""
    with suppress(BrokenPipeError):
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
        UsageError: the path is a folder, or its folder is missing or read-only.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"cannot write {path}: permission denied")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: to a file beside it, then renamed.

    A device such as `/dev/stdout`, which cannot be replaced, is written to directly.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(beside, _mode(target))
        os.replace(beside, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _mode(path: Path) -> int:
    """Return the permissions a file at `path` has or, when new, would get."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
