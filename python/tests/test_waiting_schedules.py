"""A thousand random schedules of calls that wait, are cancelled, hold permits and are let go."""

from __future__ import annotations

import asyncio
import random
import time
from asyncio import Task
from contextlib import ExitStack
from typing import Any

from callgate import Decision, Limiter, ToolRateLimit

LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""

SCHEDULES = 1000
AT_ONCE = 100


class Fault(Exception):
    """What a call raises while it runs."""


class Clock:
    """The machine's clock, which can be moved on when all is done."""

    def __init__(self) -> None:
        self.made = time.monotonic()
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self.made + self.ahead


class Schedule:
    """Some calls of one limiter, in one loop, with a random course."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.limits = self._limits()
        self.limiter = Limiter(self.limits, clock=self.clock)
        self.max_concurrent = min(
            [limit.max_concurrent for limit in self.limits.values() if limit.max_concurrent],
            default=None,
        )
        self.burst = min(limit.burst for limit in self.limits.values())
        self.rate = min(limit.requests_per_second for limit in self.limits.values())
        self.running = 0
        self.spent = 0
        self.came: list[int] = []
        self.served: list[int] = []
        self.cancelled = 0
        self.longest_stop = 0.0
        self.others: list[Task[Decision]] = []

    def _limits(self) -> dict[str, ToolRateLimit]:
        choose = self.random.choice
        limits: dict[str, ToolRateLimit] = {}
        for number in range(choose([1, 1, 2, 3])):
            limits[f"limit {number}"] = ToolRateLimit(
                choose([1000, 3000, 10_000]),
                choose([1, 2, 3]),
                tools="search",
                max_wait=LONG,
                max_concurrent=choose([None, None, 1, 2]),
            )
        return limits

    async def run(self) -> None:
        numbers = range(self.random.randint(2, 14))
        calls = [asyncio.create_task(self.call(number)) for number in numbers]
        if self.random.random() < 0.2:
            # Before its first step.
            self.cancel(calls[0])
        while not all(call.done() for call in calls):
            before = self.clock()
            await asyncio.sleep(0 if self.random.random() < 0.9 else 0.0005)
            self.longest_stop = max(self.longest_stop, self.clock() - before)
            self.disturb([task for task in (*calls, *self.others) if not task.done()])
        await asyncio.gather(*self.others, return_exceptions=True)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert result is None or isinstance(result, Fault | asyncio.CancelledError), result
        self.check()

    def disturb(self, calls: list[Task[Any]]) -> None:
        """Does what may come between."""
        for call in calls:
            sleep = getattr(call, "_fut_waiter", None)
            # The tick of the grant, say: it was woken, and has not asked yet.
            is_woken = sleep is not None and sleep.done()
            if self.random.random() < (0.2 if is_woken else 0.002):
                self.cancel(call, is_woken=is_woken)
        if self.random.random() < 0.2:
            with self.limiter.try_acquire("search") as decision:
                self.count(decision, 1)
        if self.random.random() < 0.02:
            # One that may come when nobody wants it any more.
            task = asyncio.create_task(self.limiter.acquire("search"))
            task.add_done_callback(self.let_go)
            self.others.append(task)

    def cancel(self, call: Task[Any], *, is_woken: bool = False) -> None:
        call.cancel()
        self.cancelled += 1
        CANCELLED[is_woken] += 1

    def count(self, decision: Decision, cost: int) -> None:
        if decision:
            self.spent += cost
            assert self.spent <= self.burst + self.rate * self.clock()

    def let_go(self, task: Task[Decision]) -> None:
        if not task.cancelled():
            with task.result() as decision:
                self.count(decision, 1)

    async def call(self, number: int) -> None:
        for _ in range(self.random.choice([0, 0, 0, 1, 5])):
            await asyncio.sleep(0)
        self.came.append(number)
        cost = self.random.randint(1, self.burst)
        with await self.limiter.acquire("search", cost=cost) as decision:
            assert decision
            self.count(decision, cost)
            self.served.append(number)
            self.running += 1
            try:
                assert self.running <= (self.max_concurrent or self.running)
                for _ in range(self.random.choice([0, 0, 1, 3])):
                    await asyncio.sleep(0)
                if self.random.random() < 0.1:
                    raise Fault
            finally:
                self.running -= 1

    def check(self) -> None:
        # Who is 50 ms late is passed over, be it that the whole loop was stopped for so long.
        if self.longest_stop < 0.04:
            assert self.served == [number for number in self.came if number in self.served]
        assert len(self.served) >= len(self.came) - self.cancelled
        assert self.running == 0
        # Long after that all buckets are full, nobody is in the way, and no permit is lost.
        self.clock.ahead = 1000.0
        levels = self.limiter.snapshot()
        assert {name: level.remaining for name, level in levels.items()} == {
            name: limit.burst for name, limit in self.limits.items()
        }
        with ExitStack() as held:
            for _ in range(self.max_concurrent or 1):
                decision = held.enter_context(self.limiter.try_acquire("search", cost=self.burst))
                assert decision, decision
                self.clock.ahead += 1000.0


CANCELLED = {False: 0, True: 0}
"""How many calls were cancelled: those that were not woken, and those that were."""


async def test_r13_a_thousand_random_schedules_lose_no_call_no_token_and_no_permit() -> None:
    for first in range(0, SCHEDULES, AT_ONCE):
        schedules = [Schedule(seed) for seed in range(first, first + AT_ONCE)]
        runs = asyncio.gather(*(schedule.run() for schedule in schedules))
        await asyncio.wait_for(runs, LONG)
    # Whatever the machine is like, this many are in the thousand.
    assert CANCELLED[False] > 100
    assert CANCELLED[True] > 100
