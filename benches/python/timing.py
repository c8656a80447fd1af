"""CPU time in interleaved rounds.

On a machine with other work to do, times drift by more than what is to be told apart. So every
subject runs for a fraction of a millisecond in every round, each round starts with another one, and
what is reported is the median, over the rounds, of a ratio or a difference within one round.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

Batch: TypeAlias = Callable[[], Awaitable[float]]
"""Calls its subject many times and answers with the CPU nanoseconds of one call."""

Samples: TypeAlias = Sequence[float]
"""A figure of each round."""


def calling(call: Callable[[str], object], names: Sequence[str]) -> Batch:
    """Calls with each of the names in turn."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for name in names:
            call(name)
        return (time.thread_time_ns() - start) / len(names)

    return batch


def calling_as(call: Callable[..., object], names: Sequence[str], tenants: Sequence[str]) -> Batch:
    """Calls with each of the names in turn, and with a tenant each."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for name, tenant in zip(names, tenants, strict=True):
            call(name, tenant=tenant)
        return (time.thread_time_ns() - start) / len(names)

    return batch


def repeating(call: Callable[[], object], times: int) -> Batch:
    """Calls without arguments."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for _ in range(times):
            call()
        return (time.thread_time_ns() - start) / times

    return batch


def awaiting(call: Callable[[], Awaitable[Any]], times: int) -> Batch:
    """Calls without arguments and awaits each answer before the next call."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for _ in range(times):
            await call()
        return (time.thread_time_ns() - start) / times

    return batch


def awaiting_each(call: Callable[[str], Awaitable[Any]], names: Sequence[str]) -> Batch:
    """Calls with each of the names in turn and awaits each answer before the next call."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for name in names:
            await call(name)
        return (time.thread_time_ns() - start) / len(names)

    return batch


def looping(names: Sequence[str]) -> Batch:
    """The loop of `calling`, with nothing in it."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for _ in names:
            pass
        return (time.thread_time_ns() - start) / len(names)

    return batch


def looping_as(names: Sequence[str], tenants: Sequence[str]) -> Batch:
    """The loop of `calling_as`, with nothing in it."""

    async def batch() -> float:
        start = time.thread_time_ns()
        for _ in zip(names, tenants, strict=True):
            pass
        return (time.thread_time_ns() - start) / len(names)

    return batch


async def measure(batches: Mapping[str, Batch], rounds: int) -> dict[str, list[float]]:
    """Runs all batches in every round, after one round that does not count."""
    samples: dict[str, list[float]] = {name: [] for name in batches}
    order = list(batches)
    for batch in batches.values():
        await batch()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                samples[name].append(await batches[name]())
            order.append(order.pop(0))
            # What a subject left to the event loop runs now, and is not counted.
            await asyncio.sleep(0)
    finally:
        gc.enable()
    return samples


def minus(samples: Samples, other: Samples) -> list[float]:
    """The difference in each round."""
    return [one - two for one, two in zip(samples, other, strict=True)]


def plus(samples: Samples, other: Samples) -> list[float]:
    """The sum in each round."""
    return [one + two for one, two in zip(samples, other, strict=True)]


def ratio(samples: Samples, other: Samples) -> float:
    """The median of the ratios in each round."""
    return statistics.median(one / two for one, two in zip(samples, other, strict=True))


def median(samples: Samples) -> float:
    """The middle one."""
    return statistics.median(samples)
