"""Calls that wait in threads, beside event loops; signals; and processes that fork while calls wait."""

from __future__ import annotations

import _thread
import asyncio
import json
import operator
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from callgate import Decision, Limiter, ToolRateLimit

from .running import run_program

PROGRAMS = Path(__file__).parent / "programs"
LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""


def all_end(works: list[Callable[[], object]]) -> None:
    """Runs each in a thread of its own."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LONG
    for thread in threads:
        thread.join(end - time.monotonic())
    assert not any(thread.is_alive() for thread in threads)


class Running:
    """Counts the calls that run at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.all = 0

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.all += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("max_concurrent", [None, 1, 3], ids=str)
def test_four_loops_and_four_threads_share_one_limiter(max_concurrent: int | None) -> None:
    made = time.monotonic()
    limit = ToolRateLimit(3000, 5, max_wait=LONG, max_concurrent=max_concurrent)
    limiter = Limiter({"search": limit})
    running = Running()

    async def call() -> None:
        decision = await limiter.acquire("search")
        assert decision, decision
        with decision, running:
            await asyncio.sleep(0)

    async def loop() -> None:
        await asyncio.gather(*(call() for _ in range(100)))

    def thread() -> None:
        for _ in range(100):
            decision = limiter.acquire_sync("search")
            assert decision, decision
            with decision, running:
                time.sleep(0)

    all_end([lambda: asyncio.run(loop()), thread] * 4)
    assert running.all == 800
    assert running.all <= 5 + 3000 * (time.monotonic() - made)
    if max_concurrent:
        assert running.most <= max_concurrent
    # Nobody is left, and no permit is lost.
    with ExitStack() as held:
        for _ in range(max_concurrent or 1):
            assert held.enter_context(limiter.acquire_sync("search", cost=5))


def test_r17_a_thread_that_waits_stops_neither_a_loop_nor_other_keys() -> None:
    slow = ToolRateLimit(1e6, 1000, per=["key"], max_concurrent=1, max_wait=LONG)
    quick = ToolRateLimit(5000, 1, max_wait=LONG)
    limiter = Limiter({"slow": slow, "quick": quick})
    served: list[Decision] = []

    def wait() -> None:
        with limiter.acquire_sync("slow", key="held") as decision:
            served.append(decision)

    async def main() -> int:
        calls = [asyncio.create_task(limiter.acquire("quick")) for _ in range(500)]
        beats = 0
        while not all(call.done() for call in calls):
            beats += 1
            await asyncio.sleep(0.001)
            with limiter.try_acquire("slow", key=beats) as decision:
                assert decision
        assert all(call.result() for call in calls)
        return beats

    with limiter.try_acquire("slow", key="held"):
        thread = threading.Thread(target=wait)
        thread.start()
        # The calls alone take 100 ms.
        assert asyncio.run(main()) >= 10
        for _ in range(1000):
            with limiter.try_acquire("slow", key="other") as decision:
                assert decision
        assert not served
    thread.join(LONG)
    assert all(served)
    assert len(served) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there it is another signal")
@pytest.mark.parametrize("where", ["thread", "loop"])
def test_r17_ctrl_c_ends_a_wait_and_gives_the_place_up(where: str) -> None:
    program = [sys.executable, "-W", "error", str(PROGRAMS / "interrupted.py"), where]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout == "interrupted\nTrue\n", done.stderr
    assert done.returncode == -signal.SIGINT
    assert done.stderr.strip().endswith("KeyboardInterrupt")


def test_ctrl_c_that_comes_as_another_is_let_go_on_does_not_hold_that_up() -> None:
    limiter = Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=1)})
    running = limiter.try_acquire("search")
    decisions: list[Decision] = []

    def wait() -> None:
        with limiter.acquire_sync("search", max_wait=LONG) as decision:
            decisions.append(decision)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.1)  # It sleeps by then; else the test asks for less than it could.
    # Both in C, so that Python runs what the signal asks for only when it wakes the other.
    steps: tuple[Callable[[], Any], ...] = (_thread.interrupt_main, running.__exit__)
    with pytest.raises(KeyboardInterrupt):
        list(map(operator.methodcaller("__call__"), steps))
    # Far sooner than it would be refused.
    thread.join(LONG / 3)
    assert decisions
    assert all(decisions)


@pytest.mark.skipif(sys.platform == "win32", reason="there it is another signal")
@pytest.mark.parametrize("raising", [False, True])
def test_a_handler_of_another_signal_runs_while_a_thread_waits(raising: bool) -> None:
    limiter = Limiter({"search": ToolRateLimit(5, 1, max_wait=LONG)})
    assert limiter.try_acquire("search")
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        if raising:
            raise TimeoutError

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        if raising:
            with pytest.raises(TimeoutError):
                limiter.acquire_sync("search")
        else:
            assert limiter.acquire_sync("search")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [signal.SIGALRM]
    # It has not been charged where it was ended, and holds nobody up.
    assert limiter.acquire_sync("search")


def test_a_process_ends_though_a_daemon_thread_waits_and_a_permit_is_held() -> None:
    assert run_program(PROGRAMS / "exits.py", warnings="ignore") == "True\n"


fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


@fork
def test_r19_a_forked_child_answers_at_once_though_others_waited_and_ran_in_its_parent() -> None:
    said = json.loads(run_program(PROGRAMS / "fork_waiting.py", warnings="ignore"))
    child = [True, True, "concurrency", "concurrency", True, True, True, True]
    assert said["children"] == [child] * 20
    assert said["slowest"] < 1
    assert said["parent"] == [True] * 3


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=fork)])
def test_r19_processes_that_are_started_afresh_call_decorated_functions(method: str) -> None:
    said = json.loads(run_program(PROGRAMS / "start_waiting.py", method))
    found = [[number + 1, number + 1, number + 2] for number in range(4)]
    again = [number + 1 for number in range(4)]
    assert said == {"found": found, "again": again, "reason": "rate"}


@pytest.mark.parametrize("others", ["pause", "reload"])
def test_pauses_and_reloads_beside_calls_that_wait_do_not_wait_for_each_other(others: str) -> None:
    limits = {"search": ToolRateLimit(1000, 1, max_wait=LONG)}
    limiter = Limiter(limits)
    waits = True

    def pause() -> None:
        for _ in range(300):
            limiter.pause("search", 0.0005)
            time.sleep(0)

    def reload() -> None:
        for _ in range(300):
            limiter.reload(limits)
            time.sleep(0)

    async def loop() -> None:
        while waits:
            await asyncio.gather(*(limiter.acquire("search") for _ in range(20)))

    waiting = threading.Thread(target=lambda: asyncio.run(loop()), daemon=True)
    waiting.start()
    all_end([pause, {"pause": pause, "reload": reload}[others]])
    waits = False
    waiting.join(LONG)
    assert not waiting.is_alive()


async def test_a_thread_that_waits_in_an_event_loop_is_warned_that_the_loop_stops() -> None:
    limiter = Limiter({"search": ToolRateLimit(100, burst=1, max_wait=LONG)})
    assert limiter.acquire_sync("search"), "nobody waits, nobody is warned"
    decorated = limiter.limit("search")(lambda: True)
    for search in (decorated, lambda: limiter.acquire_sync("search")):
        with pytest.warns(RuntimeWarning, match="await limiter.acquire there") as warned:
            assert search()
        assert [warning.filename for warning in warned] == [__file__]


async def test_a_warning_that_is_an_error_leaves_nobody_waiting() -> None:
    limiter = Limiter({"search": ToolRateLimit(100, burst=1, max_wait=LONG)})
    assert limiter.acquire_sync("search")
    with pytest.raises(RuntimeWarning):
        limiter.acquire_sync("search")
    assert await limiter.acquire("search")
