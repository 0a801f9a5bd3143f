"""A hetplan command, or a program, on a device slowed to a share of its core: a rank sleeps until its time is up.

    python paced.py SPEED hetplan-arguments ...
    python paced.py SPEED program.py arguments ...

An action (a forward or backward pass of a microbatch, deferred weight gradients, an update) is over when

    processor time of its thread / speed + time in collectives

has passed since it began; what it makes is sent only then. Waiting for other ranks is not slowed. `hetplan profile` is
told the speed and reckons with it. Needs no rights, and repeats better than a quota, which lets a rank that has waited
run at full speed for a while.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class Pace:
    """When the action at hand may end."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._start_s = self._start_cpu_s = 0.0
        self._clock: Any = None
        self._depth = 0

    def begin(self, clock: Any) -> None:
        """Start an action; `clock` counts its seconds in collectives."""
        self._start_s, self._start_cpu_s, self._clock = time.monotonic(), time.thread_time(), clock

    def settle(self) -> None:
        """Sleep until the work done since the beginning would have taken so long."""
        talked_s = sum(self._clock.seconds.values()) if self._clock is not None else 0.0
        due_s = (time.thread_time() - self._start_cpu_s) / self._speed + talked_s
        time.sleep(max(0.0, self._start_s + due_s - time.monotonic()))

    def paced(self, work: Callable[..., Any], clock_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work` at this pace."""

        @wraps(work)
        def slow(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return work(*arguments, **named)
            self._depth += 1
            try:
                self.begin(clock_of(*arguments))
                result = work(*arguments, **named)
                self.settle()
            finally:
                self._depth -= 1
            return result

        return slow

    def settled(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Return `send` that waits for the action's time before anything leaves."""

        @wraps(send)
        def late(*arguments: Any, **named: Any) -> Any:
            self.settle()
            return send(*arguments, **named)

        return late


def slow_down(speed: float) -> None:
    """Put the executor's actions under a pace."""
    from hetplan.runtime.buckets import Optimizer
    from hetplan.runtime.linear import Deferred
    from hetplan.runtime.pipeline import Pipeline

    pace = Pace(speed)
    for name in ("_forward", "_backward"):
        setattr(Pipeline, name, pace.paced(getattr(Pipeline, name), lambda pipeline, *_: pipeline._work.mesh.clock))
    Pipeline._send = pace.settled(Pipeline._send)
    Deferred.run = pace.paced(Deferred.run, lambda *_: None)
    for name in ("square_norm", "step"):
        setattr(Optimizer, name, pace.paced(getattr(Optimizer, name), lambda *_: None))


def take_precedence() -> None:
    """Let this rank run before whatever else the machine does, where the user may; it sleeps most of the time."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main() -> None:
    from hetplan.cli.start import main as hetplan_main

    speed, words = float(sys.argv[1]), sys.argv[2:]
    if speed < 1.0 and find_spec("torch") is not None:
        import_module("torch")
        take_precedence()
    is_program = words[0].endswith(".py")
    if words[0] == "profile":
        words += ["--speed", str(speed)]
    elif speed < 1.0 and (is_program or words[0] == "run"):
        slow_down(speed)
    if is_program:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = ["hetplan", *words]
    hetplan_main()


if __name__ == "__main__":
    main()
