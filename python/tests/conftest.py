"""What every test may use."""

from __future__ import annotations

import pytest

from .clocks import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still, at a reading that is no round number."""
    return FakeClock(1000.3)
