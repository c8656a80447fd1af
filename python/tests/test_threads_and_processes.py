"""One limiter in many threads at once, and after a process has forked or started others."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from callgate import Decision, Limiter, ToolRateLimit

from .clocks import FakeClock
from .running import hammer, run_program

PROGRAMS = Path(__file__).parent / "programs"


def test_threads_share_one_burst_exactly(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 10_000)}, clock=clock)

    def ask(_number: int) -> int:
        return sum(limiter.try_acquire("search").admitted for _ in range(25_000))

    assert hammer(ask) == 10_000


def test_threads_share_what_time_brings_exactly(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1000, 5000)}, clock=clock)

    def ask(number: int) -> int:
        admitted = 0
        for call in range(25_000):
            admitted += limiter.try_acquire("search").admitted
            if number == 0 and call % 100 == 99:
                clock.now += 1 / 64
        return admitted

    admitted = hammer(ask)
    # The bucket is never full on the way, so nothing is lost. What is left is drawn here.
    while limiter.try_acquire("search"):
        admitted += 1
    assert admitted == 5000 + int(250 / 64 * 1000)


def test_threads_share_the_bucket_of_each_tenant_exactly(clock: FakeClock) -> None:
    limits = {
        "search": ToolRateLimit(1, 7, per=["tenant"]),
        "all": ToolRateLimit(1, 9000, tools="*"),
    }
    limiter = Limiter(limits, clock=clock)

    def ask(_number: int) -> int:
        tenants = range(1000)
        return sum(
            limiter.try_acquire("search", tenant=tenant).admitted
            for _ in range(5)
            for tenant in tenants
        )

    assert hammer(ask) == 7000
    assert limiter.snapshot()["all"].remaining == 2000
    assert limiter.snapshot()["search"].buckets == 1000


def test_threads_on_the_real_clock_stay_within_the_bound() -> None:
    before = time.monotonic()
    limiter = Limiter({"search": ToolRateLimit(10_000, 50)})

    def ask(_number: int) -> int:
        return sum(limiter.try_acquire("search").admitted for _ in range(25_000))

    admitted = hammer(ask)
    elapsed = time.monotonic() - before
    assert 50 < admitted <= 50 + 10_000 * elapsed


def test_a_clock_that_stops_to_let_others_run_still_admits_the_burst_exactly() -> None:
    def clock() -> float:
        time.sleep(0)  # Hands over to another thread between the reading and the decision.
        return 1000.0

    limiter = Limiter({"search": ToolRateLimit(1, 100)}, clock=clock)

    def ask(_number: int) -> int:
        return sum(limiter.try_acquire("search").admitted for _ in range(1000))

    assert hammer(ask) == 100


def test_a_reading_from_before_a_step_back_does_not_undo_it() -> None:
    now = [1000.0]
    reading, go_on = threading.Event(), threading.Event()

    def clock() -> float:
        time = now[0]
        if threading.current_thread() is held:
            reading.set()
            assert go_on.wait(10)
        return time

    found: list[Decision] = []
    held = threading.Thread(target=lambda: found.append(limiter.try_acquire("search")))
    limiter = Limiter({"search": ToolRateLimit(1, 2)}, clock=clock)
    assert [limiter.try_acquire("search").admitted for _ in range(3)] == [True, True, False]
    held.start()
    assert reading.wait(10)
    now[0] = 0.0
    assert not limiter.try_acquire("search")
    go_on.set()
    held.join()
    assert [decision.retry_after for decision in found] == [1.0]
    assert not limiter.try_acquire("search")
    now[0] = 1.0
    assert [limiter.try_acquire("search").admitted for _ in range(2)] == [True, False]


fork = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


@fork
def test_r19_a_forked_child_answers_at_once_and_counts_apart_from_its_parent() -> None:
    # From 3.12 on Python warns of any fork of a process that has threads.
    said = json.loads(run_program(PROGRAMS / "fork.py", warnings="ignore"))
    left = [[True, True, False, False]] * 2
    # Two limiters, two calls of each admitted and two rejected; nothing of what the parent counted.
    counts = [["admitted", 4], ["rejected_rate", 4]]
    child = {"before": [], "found": left, "counts": counts}
    assert said == {"children": [child] * 20, "parent": left}


@fork
def test_r19_a_forked_child_answers_at_once_though_threads_were_at_the_keys_of_its_limits() -> None:
    said = json.loads(run_program(PROGRAMS / "fork_keys.py", warnings="ignore"))
    # A new tenant has its token, one that was known has not; and a reload brings none.
    child = {"found": [True, False, False, True], "again": [False] * 4}
    assert said["children"] == [child] * 20
    assert said["slowest"] < 1
    assert said["parent"] == [True, False, False, True]


def test_r24_beyond_a_million_tenants_new_ones_share_a_bucket_and_one_warning_says_so() -> None:
    said = json.loads(run_program(PROGRAMS / "pooled.py"))
    # The keys do not fill the table evenly. All that found no place share one bucket, of three tokens.
    assert 1_000_000 < said["buckets"] < 1_150_000
    assert said["admitted"] == said["buckets"] - 1 + 3
    assert said["known"] == 0
    assert said["blocked"] == [True, True, True, False, False]
    assert said["logged"] == [
        [
            "callgate",
            "WARNING",
            (
                "limit 'lookup' has a million buckets that are not full: "
                "calls with other fields share one bucket until there is room"
            ),
        ]
    ]
    # In KiB: some 40 bytes a key, and twice that while they move.
    assert said["peak"] < 150_000


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=fork)])
def test_r19_processes_that_are_started_afresh_count_apart(method: str) -> None:
    said = json.loads(run_program(PROGRAMS / "start.py", method))
    full = [True, True, True, False]
    assert said == {"children": [full] * 3, "parent": [True, True, False]}
