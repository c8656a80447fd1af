"""What every test may use."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

from .clocks import FakeClock

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell that starts a command in the background has it ignore Ctrl-C, and whatever that starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still, at a reading that is no round number."""
    return FakeClock(1000.3)
