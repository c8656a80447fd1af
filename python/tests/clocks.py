"""Time for tests."""

from __future__ import annotations


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        """Starts at a reading.

        Args:
            now: The first reading, in seconds.
        """
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds
