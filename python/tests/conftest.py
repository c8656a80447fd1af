"""What every test may use."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from .clocks import FakeClock
from .servers import Server

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


_prefixes = itertools.count()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A Redis server that nobody stops."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A Redis server of this test alone."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def redis_url(shared_server: Server) -> str:
    """A store that is empty."""
    return shared_server.url(f"test-{next(_prefixes)}")
