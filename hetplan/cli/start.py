"""Where the program starts: Ctrl-C ends it with one line and 130 from the first moment to the last.

Until the commands are imported there is nothing to save, and the interrupt ends the process at once. From then on it is
an exception like any other, which a search answers with the best plan so far. A library that is being imported may make
another exception of it; `was_interrupted` then still knows. Where the caller has interrupts ignored (`nohup`), they
stay ignored.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

_seen: list[int] = []
"""Interrupts that have come."""


def main() -> None:
    """Run the command of the command line and end with its exit code."""
    # Imports and planning make many small objects and next to no cycles: look for those less often.
    gc.set_threshold(200_000, 20, 20)
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    from hetplan.cli.main import run

    if heeded:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == INTERRUPTED:
        _end()
    sys.exit(code)


def was_interrupted() -> bool:
    """Whether Ctrl-C has been pressed."""
    return bool(_seen)


def _interrupt(number: int, _: object) -> None:
    """Remember the interrupt and raise it."""
    _seen.append(number)
    raise KeyboardInterrupt


def _leave(*_: object) -> None:
    """End at once: nothing has begun."""
    with suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def _end() -> None:
    """End with 130: after an interrupt that came in the middle of an `exec`, Python would end by the signal instead."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(INTERRUPTED)
