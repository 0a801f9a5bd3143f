"""Options of the whole test run."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background has interrupts ignored, and commands under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeated", derandomize=True, deadline=None, database=None)
settings.load_profile("repeated")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden texts with what the code says now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden texts are to be rewritten rather than compared."""
    return bool(request.config.getoption("--update-golden"))
