"""Everything that can go wrong for a reason a user can act on, each with its exit code.

One tree: the command line catches `HetplanError`, prints its one sentence on stderr and exits with `exit_code`.
Anything else that escapes is a defect of hetplan (exit 1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where in a file a value stands; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class HetplanError(Exception):
    """Base of all errors a user can act on."""

    exit_code = 1


class UsageError(HetplanError):
    """The command line, or a value passed to a function, is not usable."""

    exit_code = 2


class SpecError(HetplanError):
    """A file is not what its kind demands; the message starts with file:line:column and the path of the field."""

    exit_code = 2

    def __init__(self, message: str, *, location: Location | None = None, path: str = "") -> None:
        self.location = location
        self.path = path
        where = f"{location}: " if location else ""
        field = f"{path}: " if path else ""
        super().__init__(f"{where}{field}{message}")


class CalibrationError(HetplanError):
    """A number is needed that was neither measured nor stated in a datasheet."""

    exit_code = 2


class InfeasibleError(HetplanError):
    """No plan satisfies the request; the message says which constraint binds and what would help.

    `diagnosis` holds the same as numbers where a search made it (`hetplan.search.diagnosis`), else None.
    """

    exit_code = 3

    def __init__(self, message: str, diagnosis: object = None) -> None:
        self.diagnosis = diagnosis
        super().__init__(message)


class CheckFailedError(HetplanError):
    """A plan breaks a rule or has drifted from what it promised."""

    exit_code = 4


class EffortError(HetplanError):
    """The effort or time limit was spent before any plan was found."""

    exit_code = 5


class RunError(HetplanError):
    """A running job failed: a rank died or hung, a disk was full, a checkpoint is damaged."""

    exit_code = 6


class InterruptedSearchError(HetplanError):
    """The user interrupted; `result` holds the best found so far, or None."""

    exit_code = 130

    def __init__(self, message: str, result: object = None) -> None:
        self.result = result
        super().__init__(message)
