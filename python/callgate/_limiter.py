"""`Limiter`: the extension's, and waiting, which Python does with its own loops, timers and locks.

A Redis store's answers come from a thread of the extension's that does not know Python: it makes a file
descriptor readable, to which an event loop listens, or a thread that waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import os
import threading
import traceback
import warnings
import weakref
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from contextlib import suppress
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex, TypeVar

from callgate import _callgate
from callgate._callgate import Decision, Home, LimitSnapshot, Turn
from callgate._errors import ConfigError, RateLimitExceeded, StoreError

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")

STOPS_THE_LOOP = "{} waits in a thread that runs an event loop, which stops meanwhile: {}"
INSTEAD = "await limiter.acquire there, or decorate an async function"


class Limiter(_callgate.Limiter):
    """Decides whether a tool's call may run: now, or when its turn comes.

    All limits that hold for a tool must admit its call, and then all are charged; where one refuses,
    none is. A tool that no limit holds for falls under the default, or is not limited.

    One instance may be used from any number of threads and event loops at once; it belongs to none
    of them. A forked child goes on with a copy: from then on the two count apart, unless they share a
    store. Waiting is each process's own, but for Redis, where processes take turns; `max_concurrent` always is.

    Args:
        limits: The limits by name. A limit's name is its tool, or a pattern of tools such as
            ``"crm_*"``, unless the limit names its `tools` itself.
        default: The limit of each tool that no other limit holds for, with a bucket for each of them.
        store: The URL of a store that other processes share. ``"shm:/run/myapp/callgate"`` is a
            file in memory, for all processes of this host and user (Linux). The folder has to exist.
            ``?slots=N`` says for how many buckets it is made, 65,536 unless given.
            ``"redis://user:password@host:6379/0?prefix=myapp&timeout=250ms"`` is a Redis or Valkey server, for
            any number of hosts; ``rediss://…`` over TLS, ``unix:///path/to/socket?prefix=myapp``,
            ``redis+sentinel://host:26379/service/0?prefix=myapp``. The prefix keeps applications apart; no call
            waits for an answer longer than the timeout, from 1 ms to 60 s. The limiter is made whether the
            server is there or not. Without a store the buckets are this process's own.
        on_store_error: What becomes of a call while a Redis store fails, where its limits do not say it.
            ``"local"``, the default: a bucket of this process at the same limit decides, so that N processes
            admit up to N times as much together. ``"deny"``: it is rejected, with the reason ``"store"``.
            ``"admit"``: it passes. ``"raise"``: `StoreError` is raised. Of several limits the strictest says
            it: raise, deny, local, admit.
        dry_run: Whether to let every call pass, and only say and count what would have been
            refused. What would have been refused spends nothing, and nothing waits.
        clock: Not beside a store. A callable that returns the time in seconds as a float, as `time.monotonic` does;
            for tests that move time. Readings count in whole nanoseconds. One that is up to 2 s
            below the highest so far counts as the highest; after a larger step back, time goes on
            from the new reading, and nothing is gained or lost by the step. A reading 2^63 ns (292
            years) or more from the first is refused. By default the operating system's monotonic
            clock, which need not count the time asleep. Calls that wait sleep in real time all the
            same, and no longer than they may. (Do not leave a daemon thread inside a clock of your
            own when the interpreter exits: that can abort the process.)

    Raises:
        ConfigError: If a limit or another value is not what it should be, or the store cannot be used.

    A limiter may be used in a ``with`` or ``async with`` block, at whose end it is closed: see `close`.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> limiter = Limiter(
        ...     {"search": ToolRateLimit(10, burst=10, per=["tenant"])},
        ...     default=ToolRateLimit(1, burst=5),
        ... )
        >>> if limiter.try_acquire("search", tenant="acme"):
        ...     print("run the tool")
        run the tool
    """

    __module__ = "callgate"
    __slots__ = ()

    if not TYPE_CHECKING:
        # As the extension has it.
        __signature__ = inspect.signature(_callgate.Limiter)

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            limiter = super().__new__(cls, *args, **kwargs)
            if cls is Limiter and limiter._is_remote:
                limiter.__class__ = RemoteLimiter
            return limiter

    async def acquire(
        self,
        tool: str,
        *,
        cost: SupportsIndex | EllipsisType = ...,
        max_wait: float | None = None,
        **fields: str | int | None,
    ) -> Decision:
        """Decides on one call, which may wait for its turn.

        A call that can be served within `max_wait` waits, in order of arrival; any other is rejected at
        once. Of several limits that refuse a call it waits for the one that does so for the longest.
        While calls wait for a bucket, others are refused there or wait behind them. A turn comes up to
        50 ms later than `max_wait` where timers are late. Whoever is cancelled gives up the place, and
        spends nothing, but for a Redis store that is being asked: it may have charged the call. It never
        blocks the event loop.

        Args:
            tool: The tool's name.
            cost: The call's cost in tokens, as in `try_acquire`.
            max_wait: How many seconds it may wait, from 0 to 86,400; by default the shortest `max_wait`
                of the limits that refuse it.
            fields: What limits are split by, as in `try_acquire`.

        Returns:
            The decision. The tokens are spent when it admits, whatever becomes of the call.

        Raises:
            ConfigError: As in `try_acquire`, or if `max_wait` is not what it should be.
            StoreError: As in `try_acquire`.

        Example:
            >>> import asyncio
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(100, burst=1, max_wait=2)})
            >>> async def three() -> list[bool]:
            ...     decisions = await asyncio.gather(*(limiter.acquire("search") for _ in range(3)))
            ...     return [decision.admitted for decision in decisions]
            >>> asyncio.run(three())
            [True, True, True]
        """
        begun = self._begin(tool, cost, max_wait, fields)
        # isinstance would cost a tenth of an admitted call.
        return begun if type(begun) is Decision else await wait(begun)

    def acquire_sync(
        self,
        tool: str,
        *,
        cost: SupportsIndex | EllipsisType = ...,
        max_wait: float | None = None,
        **fields: str | int | None,
    ) -> Decision:
        """`acquire` for threads: other threads run while it waits, and Ctrl-C ends it.

        In a thread that runs an event loop it would stop that loop while it waits, and warns of it with
        `RuntimeWarning`: there, await `acquire`.

        Args:
            tool: The tool's name.
            cost: The call's cost in tokens, as in `try_acquire`.
            max_wait: How many seconds it may wait, as in `acquire`.
            fields: What limits are split by, as in `try_acquire`.

        Returns:
            The decision. The tokens are spent when it admits, whatever becomes of the call.

        Raises:
            ConfigError: As in `acquire`.
            StoreError: As in `try_acquire`.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(100, burst=1)})
            >>> [limiter.acquire_sync("search", max_wait=1).admitted for _ in range(3)]
            [True, True, True]
        """
        begun = self._begin(tool, cost, max_wait, fields)
        return wait_in_thread(begun, "acquire_sync") if isinstance(begun, Turn) else begun

    def limit(
        self,
        tool: str,
        *,
        cost: SupportsIndex | EllipsisType = ...,
        max_wait: float | None = None,
        **fields: str | int | None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorates a function, sync or async: each call of it is a call of the tool.

        It waits as `acquire` does, or `acquire_sync` for a sync function, and counts as running until it
        returns or raises. A method is decorated in its class, under ``@staticmethod`` or
        ``@classmethod`` if it has one.

        Args:
            tool: The tool's name.
            cost: The cost of each call in tokens, as in `try_acquire`.
            max_wait: How many seconds a call may wait, as in `acquire`.
            fields: What limits are split by, as in `try_acquire`.

        Returns:
            The decorator. What it decorates raises `RateLimitExceeded` for a call that is rejected,
            which does not run, and `StoreError` as `try_acquire` does.

        Raises:
            ConfigError: If a value is not what it should be; and from the decorator, for what is no
                function, or one that is a generator.

        Example:
            >>> from callgate import Limiter, RateLimitExceeded, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=1)})
            >>> @limiter.limit("search")
            ... def search(text: str) -> str:
            ...     return f"found {text}"
            >>> search("callgate")
            'found callgate'
            >>> try:
            ...     search("callgate")
            ... except RateLimitExceeded as error:
            ...     print(error.decision.reason)
            rate
        """
        self._check(tool, cost, max_wait, fields)

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if _is_async(function):

                async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                    decision = await self.acquire(tool, cost=cost, max_wait=max_wait, **fields)
                    with _admitted(decision):
                        return await function(*args, **kwargs)  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]

                return functools.wraps(function)(run_async)  # type: ignore[return-value]

            def run(*args: P.args, **kwargs: P.kwargs) -> R:
                decision = self.acquire_sync(tool, cost=cost, max_wait=max_wait, **fields)
                with _admitted(decision):
                    return function(*args, **kwargs)

            return functools.wraps(function)(run)

        return decorate

    async def aclose(self) -> None:
        """`close`, for ``async with`` and the like. It waits for nothing either."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.close()


class RemoteLimiter(Limiter):
    """One whose store is asked over a network, which threads wait for in Python.

    A thread that Python ends as it exits must have no frame of the extension's on its stack: that would take
    the process along.
    """

    __module__ = "callgate"
    __qualname__ = "Limiter"
    __slots__ = ()

    def try_acquire(
        self, tool: str, *, cost: SupportsIndex | EllipsisType = ..., **fields: str | int | None
    ) -> Decision:
        """As the extension's."""
        begun = self._begin(tool, cost, 0.0, fields)
        return wait_in_thread(begun, "try_acquire") if isinstance(begun, Turn) else begun

    def snapshot(self) -> dict[str, LimitSnapshot]:
        """As the extension's."""
        look = self._look()
        if look is not None and look.asks_at() is not None:
            _warn_in_a_loop("snapshot", "await asyncio.to_thread(limiter.snapshot) there")
        while look is not None and (descriptor := look.asks_at()) is not None:
            _hear(descriptor)
        return self._snapshot(look)


# As errors call it.
RemoteLimiter.__name__ = "Limiter"
for _method in (RemoteLimiter.try_acquire, RemoteLimiter.snapshot):
    _method.__qualname__ = f"Limiter.{_method.__name__}"


def _admitted(decision: Decision) -> Decision:
    if not decision:
        raise RateLimitExceeded(decision)
    return decision


def _is_async(function: Callable[..., object]) -> bool:
    """Whether it is an async function; refuses what cannot be decorated."""
    for kind in (staticmethod, classmethod):
        if isinstance(function, kind):
            above = f"@{kind.__name__}"
            raise ConfigError(
                f"limit must decorate a function, and {above} what that makes: write {above} above it"
            )
    if not callable(function):
        raise ConfigError(f"limit must decorate a function, got {function!r}")
    # An object that can be called is what its __call__ is.
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigError(
                f"limit must decorate a function that returns, not a generator (whose call ends before "
                f"it runs), got {function!r}"
            )
        if inspect.iscoroutinefunction(called):
            return True
    return False


async def wait(turn: Turn) -> Decision:
    """Waits in the running event loop until a turn gives a decision."""
    loop = asyncio.get_running_loop()
    home = _home(loop)
    descriptor = home.take_in(turn)
    if descriptor is not None:
        _listen(loop, home, descriptor)
    try:
        while (decision := turn.ask()) is None:
            future = loop.create_future()
            delay = home.sleep(turn, future)
            if delay is not None:
                if delay:
                    loop.call_later(delay, _ring, home)
                await future
        return decision
    finally:
        turn.leave()


def wait_in_thread(turn: Turn, name: str = "try_acquire") -> Decision:
    """Waits in this thread until a turn gives a decision. The name is of what waits."""
    _forget_closed()
    turn.take_thread()
    try:
        if (decision := turn.ask()) is None:
            _warn_in_a_loop(name)
        while decision is None:
            # Python runs signal handlers in either wait, and one that raises ends it.
            descriptor = turn.asks_at()
            if descriptor is not None:
                _hear(descriptor)
            else:
                lock = threading.Lock()
                lock.acquire()
                lock.acquire(timeout=turn.sleep(lock))
            decision = turn.ask()
        return decision
    finally:
        turn.leave()


def _warn_in_a_loop(name: str, instead: str = INSTEAD) -> None:
    """Tells of a wait in a thread that runs an event loop: of what waits, and what to do instead."""
    if asyncio._get_running_loop() is not None:
        message = STOPS_THE_LOOP.format(name, instead)
        warnings.warn(message, RuntimeWarning, stacklevel=_frames_here())


def _hear(descriptor: int) -> None:
    """Waits until the store has answered, or for a second."""
    with suppress(BlockingIOError):
        os.read(descriptor, 64)


def _frames_here() -> int:
    """How many frames are of this module: a warning is for whoever called it."""
    frames = traceback.walk_stack(inspect.currentframe())
    here = itertools.takewhile(lambda at: at[0].f_code.co_filename == __file__, frames)
    return sum(1 for _ in here)


def wake(on: threading.Lock | Future[None]) -> None:
    """Ends a sleep: from whichever thread, and in whichever event loop. It may be ended already."""
    if not isinstance(on, Future):
        with suppress(RuntimeError):
            on.release()
        return
    loop = on.get_loop()
    if asyncio._get_running_loop() is loop:
        _finish(on)
        return
    try:
        loop.call_soon_threadsafe(_finish, on)
    except RuntimeError:
        # It is closed: nobody sleeps there, and all of them are to go before the next one is told to come.
        _forget_closed()


def _finish(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_homes: dict[weakref.ref[AbstractEventLoop], Home] = {}
"""By event loop: one that is gone is equal to no other."""


def _home(loop: AbstractEventLoop) -> Home:
    here = weakref.ref(loop)
    known = _homes.get(here)
    if known is not None and len(_homes) == 1:
        return known
    _forget_closed()
    return _homes.setdefault(here, Home())


def _listen(loop: AbstractEventLoop, home: Home, descriptor: int) -> None:
    """Has a loop wake those whom a store has answered."""
    try:
        # In a context of its own: the one of who came first would live as long as the loop.
        contextvars.Context().run(loop.add_reader, descriptor, _wake_answered, home)
    except NotImplementedError:
        raise StoreError(
            f"a Redis store cannot be awaited in {loop!r}, which has no add_reader: "
            "await asyncio.to_thread(limiter.acquire_sync, …) there"
        ) from None
    home.listens()


def _wake_answered(home: Home) -> None:
    for future in home.answered():
        _finish(future)


def _ring(home: Home) -> None:
    """Wakes those who are due in the running event loop."""
    futures, delay = home.due()
    for future in futures:
        _finish(future)
    if delay is not None:
        asyncio.get_running_loop().call_later(delay, _ring, home)


def after_fork() -> None:
    """Listens to nothing in this process that is its parent's."""
    _homes.clear()


def _forget_closed() -> None:
    """Has all go who wait in event loops that are closed or gone."""
    # A list of the keys is made at one stroke: nothing is allocated meanwhile that garbage is collected for, and
    # so no thread and no finalizer comes here in its midst.
    for there in list(_homes):
        loop = there()
        if loop is None or loop.is_closed():
            home = _homes.pop(there, None)
            if home is not None:
                home.close()
