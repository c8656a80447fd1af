"""`Limiter.limit`: functions whose every call is a tool's."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from callgate import ConfigError, Limiter, RateLimitExceeded, ToolRateLimit

from .clocks import FakeClock

LONG = 30.0
"""Seconds after which a call would be rejected, and a test hung: never reached where all is well."""


@pytest.fixture
def limiter() -> Limiter:
    """One call may run at a time, and nobody waits."""
    return Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=1)})


def is_free(limiter: Limiter) -> bool:
    with limiter.try_acquire("search") as decision:
        return decision.admitted


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls it, and awaits what comes where it is async."""
    result = function(*arguments, **named)
    if not inspect.isawaitable(result):
        return result

    async def main() -> Any:
        return await asyncio.wait_for(result, LONG)

    return asyncio.run(main())


class Tools:
    """What there is to decorate: each says whether its call counts as running."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter

        def function(*_arguments: Any, **_named: Any) -> bool:
            return not is_free(limiter)

        async def coroutine(*_arguments: Any, **_named: Any) -> bool:
            await asyncio.sleep(0)
            return not is_free(limiter)

        class Called:
            def __call__(self) -> bool:
                return function()

        class AsyncCalled:
            async def __call__(self) -> bool:
                return await coroutine()

        class Holder:
            @limiter.limit("search")
            def method(self) -> bool:
                assert isinstance(self, Holder)
                return function()

            @limiter.limit("search")
            async def async_method(self) -> bool:
                assert isinstance(self, Holder)
                return await coroutine()

            @staticmethod
            @limiter.limit("search")
            def static() -> bool:
                return function()

            @staticmethod
            @limiter.limit("search")
            async def async_static() -> bool:
                return await coroutine()

            @classmethod
            @limiter.limit("search")
            def of_class(cls) -> bool:
                assert cls is Holder
                return function()

            @classmethod
            @limiter.limit("search")
            async def async_of_class(cls) -> bool:
                assert cls is Holder
                return await coroutine()

            def plain(self) -> bool:
                return function()

            async def async_plain(self) -> bool:
                return await coroutine()

        limit = limiter.limit("search")
        holder = Holder()
        self.all: dict[str, Callable[[], Any]] = {
            "function": limit(function),
            "async function": limit(coroutine),
            "lambda": limit(lambda: function()),  # noqa: PLW0108
            "partial": limit(functools.partial(function, 1)),
            "async partial": limit(functools.partial(coroutine, 1)),
            "object": limit(Called()),
            "async object": limit(AsyncCalled()),
            "method": holder.method,
            "async method": holder.async_method,
            "staticmethod": holder.static,
            "async staticmethod": Holder.async_static,
            "classmethod": holder.of_class,
            "async classmethod": Holder.async_of_class,
            "bound method": limit(holder.plain),
            "async bound method": limit(holder.async_plain),
        }


NAMES = list(Tools(Limiter({"search": ToolRateLimit(1, 1)})).all)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_decorated_runs_as_a_call_of_the_tool(limiter: Limiter, name: str) -> None:
    tool = Tools(limiter).all[name]
    assert inspect.iscoroutinefunction(tool) == name.startswith("async")
    for _ in range(3):
        assert call(tool) is True
        assert is_free(limiter)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_rejected_does_not_run_and_raises_the_decision(
    limiter: Limiter, name: str
) -> None:
    tool = Tools(limiter).all[name]
    with limiter.try_acquire("search"):
        with pytest.raises(RateLimitExceeded) as raised:
            call(tool)
        decision = raised.value.decision
        assert (decision.tool, decision.reason, decision.limit) == (
            "search",
            "concurrency",
            "search",
        )
        assert not decision
    assert call(tool)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_raises_passes_and_its_permit_is_released(
    limiter: Limiter, is_async: bool
) -> None:
    async def coroutine() -> None:
        raise KeyError("mine")

    def function() -> None:
        raise KeyError("mine")

    tool: Callable[[], Any] = coroutine if is_async else function
    with pytest.raises(KeyError, match="mine") as raised:
        call(limiter.limit("search")(tool))
    assert raised.value.__context__ is None
    assert is_free(limiter)


@pytest.mark.parametrize("when", ["before", "waiting", "running"])
async def test_one_that_is_cancelled_releases_and_passes_that_on(
    limiter: Limiter, when: str
) -> None:
    @limiter.limit("search", max_wait=LONG)
    async def search() -> None:
        await asyncio.sleep(LONG)

    other = ExitStack()
    other.enter_context(limiter.try_acquire("search"))
    task = asyncio.create_task(search())
    if when != "before":
        await asyncio.sleep(0)
    if when == "running":
        other.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not is_free(limiter)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other.close()
    assert is_free(limiter)


async def test_async_calls_wait_in_order_and_block_no_loop() -> None:
    limiter = Limiter({"search": ToolRateLimit(500, 1)})
    done: list[int] = []

    @limiter.limit("search", max_wait=LONG)
    async def search(number: int) -> None:
        done.append(number)

    await asyncio.wait_for(asyncio.gather(*map(search, range(20))), LONG)
    assert done == list(range(20))


def test_sync_calls_wait_in_their_threads() -> None:
    limiter = Limiter({"search": ToolRateLimit(1e6, 1000, max_concurrent=2)})
    lock, running, most, ended = threading.Lock(), 0, 0, 0

    @limiter.limit("search", max_wait=LONG)
    def search() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    def work() -> None:
        nonlocal ended
        for _ in range(50):
            search()
        with lock:
            ended += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert ended == 6
    assert most <= 2


def test_cost_and_fields_are_those_of_each_call(clock: FakeClock) -> None:
    limiter = Limiter({"search": ToolRateLimit(1, 5, per=["tenant"])}, clock=clock)

    @limiter.limit("search", cost=2, tenant="acme")
    def search(**given: str) -> dict[str, str]:
        return given

    # What the function is given is its own.
    assert search(tenant="other", tool="x") == {"tenant": "other", "tool": "x"}
    assert search() == {}
    with pytest.raises(RateLimitExceeded):
        search()
    assert limiter.try_acquire("search", tenant="acme").remaining == 0
    assert limiter.try_acquire("search", tenant="other").remaining == 4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_decorated_function_looks_like_itself(limiter: Limiter, is_async: bool) -> None:
    def function(text: str, /, *, most: int = 3) -> str:
        """Searches."""
        return text * most

    async def coroutine(text: str, /, *, most: int = 3) -> str:
        """Searches."""
        return text * most

    original: Any = coroutine if is_async else function
    original.label = "mine"
    tool: Any = limiter.limit("search")(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "label"):
        assert getattr(tool, name) == getattr(original, name)
    assert inspect.signature(tool) == inspect.signature(original)
    assert tool.__wrapped__ is original
    assert call(tool, "a", most=2) == "aa"
    with pytest.raises(TypeError):
        call(tool)
    assert is_free(limiter)


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class GeneratorObject:
    def __call__(self) -> Iterator[int]:
        yield 1


async def coroutine_function() -> None:
    """Is one."""


NO_FUNCTIONS: dict[str, Any] = {
    "generator": generator,
    "async generator": async_generator,
    "partial of one": functools.partial(generator),
    "object that is one": GeneratorObject(),
    "text": "search",
    "None": None,
    # Decorated in the wrong order.
    "classmethod": classmethod(lambda _cls: None),
    "staticmethod": staticmethod(len),
    "async staticmethod": staticmethod(coroutine_function),
}


@pytest.mark.parametrize("thing", NO_FUNCTIONS.values(), ids=NO_FUNCTIONS)
def test_what_is_no_function_or_a_generator_is_refused_when_it_is_decorated(
    limiter: Limiter, thing: Any
) -> None:
    with pytest.raises(ConfigError, match="limit must decorate a function"):
        limiter.limit("search")(thing)


@pytest.mark.parametrize("above", [staticmethod, classmethod])
def test_what_is_decorated_in_the_wrong_order_is_told_the_right_one(
    limiter: Limiter, above: Any
) -> None:
    with pytest.raises(ConfigError, match=f"write @{above.__name__} above it"):
        limiter.limit("search")(above(len))


def test_a_class_is_decorated_as_what_makes_its_objects(limiter: Limiter) -> None:
    class Tool:
        async def __call__(self) -> None:
            """Says nothing of the class."""

    make = limiter.limit("search")(Tool)
    assert isinstance(make(), Tool)
    assert is_free(limiter)


def test_two_limits_on_one_function_hold_both(clock: FakeClock) -> None:
    limiter = Limiter({"a": ToolRateLimit(1, 1), "b": ToolRateLimit(1, 2)}, clock=clock)
    ran = 0

    @limiter.limit("a")
    @limiter.limit("b")
    def search() -> None:
        nonlocal ran
        ran += 1

    search()
    with pytest.raises(RateLimitExceeded, match="'a'"):
        search()
    assert ran == 1
    assert limiter.snapshot()["b"].remaining == 1
