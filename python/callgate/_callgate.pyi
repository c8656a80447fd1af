"""The extension module: the core's types."""

from asyncio import Future
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from threading import Lock
from types import EllipsisType
from typing import Any, Literal, SupportsIndex, final

from typing_extensions import Self, disjoint_base

from callgate._errors import OnStoreError

__all__ = [
    "Decision",
    "Home",
    "LimitSnapshot",
    "Limiter",
    "Look",
    "StoreCounts",
    "ToolRateLimit",
    "Trace",
    "TracedCall",
    "Turn",
    "__version__",
    "after_fork",
    "after_fork_in_parent",
    "before_fork",
    "decision_counts",
    "flush_log",
    "flush_traces",
    "main",
    "reset_decision_counts",
    "restore_decision",
    "restore_limit",
    "store_counts",
]

__version__: str

@final
class ToolRateLimit:
    """A rate limit: a token bucket with a rate and a burst (its capacity). It starts full.

    In any window of W seconds it lets at most ``burst + requests_per_second * W`` tokens through, so
    2 a second with burst 2 lets 4 calls into one second. Where a service says "never more than 100
    in any minute", take a `quota`. Immutable, hashable, equal by value, picklable.

    A float means its shortest decimal: 0.1 is one tenth, not the binary number beside it.

    Args:
        requests_per_second: How fast the bucket refills, in tokens a second: from 1 per 366 days
            (about 3.17e-8) to 1,000,000,000.
        burst: How many tokens it holds: a whole number from 1 to 4,294,967,295.
        tools: The tools that share the limit, by name or by a pattern in which ``*`` stands for any
            characters and ``?`` for any one. By default the limit's name is its tool, or its pattern.
        per: The fields of a call that split the limit, such as ``["tenant"]``: each combination of
            their values has a bucket of its own, and a call without such a field falls into that
            field's one bucket for "missing". ``"tool"`` is the tool's name; ``cost`` and
            ``max_wait`` are no fields.
        max_wait: How many seconds a call may wait for its turn, from 0 to 86,400, to the nearest
            nanosecond. One that cannot be served within this time is refused at once, without
            waiting.
        max_concurrent: How many admitted calls may run at the same time in this process, from 1 to
            4,294,967,295; where fields split the limit, so many for each of its buckets. None for
            any number.
        cost: What a call spends that does not say its cost itself: from 1 token to the burst.
        on_store_error: What becomes of a call while a Redis store fails, as in `Limiter`, which says it for
            all limits that do not.

    Raises:
        ConfigError: If a value is of the wrong kind or out of range.

    Example:
        >>> from callgate import ToolRateLimit
        >>> ToolRateLimit(requests_per_second=2, burst=2)
        ToolRateLimit(requests_per_second=2, burst=2)
        >>> ToolRateLimit(5, burst=20, tools=["crm_*", "lookup_customer"], per=["tenant"])
        ToolRateLimit(requests_per_second=5, burst=20, tools=('crm_*', 'lookup_customer'), per=('tenant',))
    """

    def __new__(
        cls,
        requests_per_second: float | SupportsIndex,
        burst: SupportsIndex,
        *,
        tools: Iterable[str] | None = None,
        per: Iterable[str] = (),
        max_wait: float | SupportsIndex = 0.0,
        max_concurrent: SupportsIndex | None = None,
        cost: SupportsIndex = 1,
        on_store_error: OnStoreError | None = None,
    ) -> ToolRateLimit: ...
    @classmethod
    def per_minute(
        cls,
        requests_per_minute: float | SupportsIndex,
        burst: SupportsIndex,
        *,
        tools: Iterable[str] | None = None,
        per: Iterable[str] = (),
        max_wait: float | SupportsIndex = 0.0,
        max_concurrent: SupportsIndex | None = None,
        cost: SupportsIndex = 1,
        on_store_error: OnStoreError | None = None,
    ) -> ToolRateLimit:
        """A limit of so many requests a minute.

        Args:
            requests_per_minute: Tokens a minute, in the same range as `requests_per_second`.
            burst: How many tokens the bucket holds.
            tools: As in `ToolRateLimit`.
            per: As in `ToolRateLimit`.
            max_wait: As in `ToolRateLimit`.
            max_concurrent: As in `ToolRateLimit`.
            cost: As in `ToolRateLimit`.
            on_store_error: As in `ToolRateLimit`.

        Raises:
            ConfigError: If a value is of the wrong kind or out of range.

        Example:
            >>> from callgate import ToolRateLimit
            >>> ToolRateLimit.per_minute(30, burst=5).requests_per_second
            0.5
        """

    @classmethod
    def parse(
        cls,
        rate: str,
        burst: SupportsIndex,
        *,
        tools: Iterable[str] | None = None,
        per: Iterable[str] = (),
        max_wait: float | SupportsIndex = 0.0,
        max_concurrent: SupportsIndex | None = None,
        cost: SupportsIndex = 1,
        on_store_error: OnStoreError | None = None,
    ) -> ToolRateLimit:
        """A limit whose rate is written as services write it.

        Args:
            rate: ``N/s``, ``N/min``, ``N/h`` or ``N/day``, with N a decimal of up to 18 digits.
            burst: How many tokens the bucket holds.
            tools: As in `ToolRateLimit`.
            per: As in `ToolRateLimit`.
            max_wait: As in `ToolRateLimit`.
            max_concurrent: As in `ToolRateLimit`.
            cost: As in `ToolRateLimit`.
            on_store_error: As in `ToolRateLimit`.

        Raises:
            ConfigError: If the rate cannot be read, or a value is of the wrong kind or out of range.

        Example:
            >>> from callgate import ToolRateLimit
            >>> ToolRateLimit.parse("300/min", burst=20) == ToolRateLimit(5, burst=20)
            True
        """

    @classmethod
    def quota(
        cls,
        count: SupportsIndex,
        per: Literal["s", "min", "h", "day"],
        burst: SupportsIndex | None = None,
        *,
        tools: Iterable[str] | None = None,
        fields: Iterable[str] = (),
        max_wait: float | SupportsIndex = 0.0,
        max_concurrent: SupportsIndex | None = None,
        cost: SupportsIndex = 1,
        on_store_error: OnStoreError | None = None,
    ) -> ToolRateLimit:
        """A limit of never more than so many tokens in any second, minute, hour or day.

        It is a bucket like any other, refilled at ``(count - burst)`` a unit of time. A larger burst
        lets more calls through at once, and fewer after that.

        Args:
            count: The most tokens in any window of the unit's length: a whole number of at least 2.
            per: The unit of time.
            burst: How many tokens the bucket holds: at least 1 and below the count; by default a
                tenth of it, at least 1.
            tools: As in `ToolRateLimit`.
            fields: The fields that split the limit: what is `per` in `ToolRateLimit`.
            max_wait: As in `ToolRateLimit`.
            max_concurrent: As in `ToolRateLimit`.
            cost: As in `ToolRateLimit`.
            on_store_error: As in `ToolRateLimit`.

        Raises:
            ConfigError: If a value is of the wrong kind or out of range.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> ToolRateLimit.quota(100, per="min")
            ToolRateLimit.quota(100, per='min', burst=10)
            >>> limit = ToolRateLimit.quota(90, per="min", burst=30, fields=["tenant"])
            >>> limit.requests_per_second
            1.0
        """

    @property
    def requests_per_second(self) -> float:
        """How fast the bucket refills, in tokens a second, as the nearest float.

        Of a quota too, where that is what its burst leaves of it.
        """

    @property
    def burst(self) -> int:
        """The bucket's capacity in tokens."""

    @property
    def tools(self) -> tuple[str, ...] | None:
        """The names and patterns of the tools that share the limit; None where its name is its tool."""

    @property
    def per(self) -> tuple[str, ...]:
        """The fields that split the limit."""

    @property
    def max_wait(self) -> float:
        """How long a call may wait for its turn, in seconds."""

    @property
    def max_concurrent(self) -> int | None:
        """How many calls may run at the same time in this process; None for any number."""

    @property
    def cost(self) -> int:
        """What a call spends that does not say its cost itself, in tokens."""

    @property
    def on_store_error(self) -> OnStoreError | None:
        """What becomes of a call while a Redis store fails; None where the limiter says it."""

    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[..., ToolRateLimit], tuple[object, ...]]: ...

@final
class Decision:
    """Whether a call may run now. True where it may.

    In a dry run every call may, and `limit`, `reason` and `retry_after` say what would have
    refused it.

    Where a limit has `max_concurrent`, run the call in a ``with`` block of its decision: at the end of
    the block the next one may run, however it ends. A decision that is dropped before that lets the
    next one run too, and warns.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> limiter = Limiter({"search": ToolRateLimit(2, burst=1)}, clock=lambda: 0.0)
        >>> bool(limiter.try_acquire("search"))
        True
        >>> limiter.try_acquire("search").retry_after
        0.5
    """

    @property
    def admitted(self) -> bool:
        """Whether the call may run; its tokens are then spent, but for one that a dry run lets pass."""

    @property
    def tool(self) -> str:
        """The tool that was asked for."""

    @property
    def limit(self) -> str | None:
        """The name of the limit that refused the call; None where none did.

        Of several it is the one that refuses for the longest. ``"[default]"`` is the limit for tools
        that no other holds for.
        """

    @property
    def reason(self) -> Literal["rate", "cost", "paused", "concurrency", "store"] | None:
        """Why it was refused; None where it was not.

        ``"rate"``: too few tokens now. ``"paused"``: the limit is paused. ``"concurrency"``: as many calls run
        as may. ``"cost"``: a cost above the burst. ``"store"``: a shared store could not be asked.
        """

    @property
    def remaining(self) -> int | None:
        """The whole tokens left in the call's bucket, of several limits in the tightest.

        None where the tool has no limit.
        """

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before the same call can be admitted, if nobody else spends.

        Never 0. None where the call was not refused, where no wait helps, and where no time can be
        told (``"concurrency"``, ``"store"``). For an injected clock, a call at ``clock() + retry_after`` (as
        floats) is admitted.
        """

    def __bool__(self) -> bool: ...
    def __enter__(self) -> Decision: ...
    def __exit__(self, *_error: object) -> None: ...
    def __reduce__(self) -> tuple[Callable[..., Decision], tuple[object, ...]]: ...

@final
class LimitSnapshot:
    """A limit, and what its buckets hold.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)})
        >>> limiter.pause("search", 30, limit="search")
        >>> snapshot = limiter.snapshot()["search"]
        >>> snapshot.limit, snapshot.remaining
        (ToolRateLimit(requests_per_second=1, burst=5), 0)
    """

    @property
    def limit(self) -> ToolRateLimit:
        """The limit."""

    @property
    def remaining(self) -> int | None:
        """The whole tokens in the bucket.

        None where fields split the limit, since each bucket has its own, or a Redis store does not tell.
        """

    @property
    def buckets(self) -> int:
        """How many buckets are kept: 1 where no field splits the limit.

        Where some do: those that are not full, and those that were not when last looked at. A
        limit keeps at most about a million; beyond that, calls with other fields share one. Of those in
        a Redis store, as many as this process knows of.
        """

    @property
    def paused(self) -> float | None:
        """The seconds for which the limit is paused from now on; None where it is not.

        Of the default limit, the tool for which that is longest.
        """

@final
class StoreCounts:
    """What a limiter has asked of its Redis store, in this process: see `Limiter.store_counts`.

    Equal by value.
    """

    @property
    def is_down(self) -> bool:
        """Whether the store is known to be down: it is not asked until it answers again."""

    @property
    def answered(self) -> int:
        """The requests that were answered."""

    @property
    def seconds(self) -> float:
        """How long those took in all, from when they were asked."""

    @property
    def failed(self) -> int:
        """The requests that failed, or were late."""

    @property
    def alone(self) -> int:
        """The decisions that were made without the store, as `on_store_error` says."""

    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@disjoint_base
class Limiter:
    """What `callgate.Limiter` is made of: everything but waiting."""

    def __new__(
        cls,
        limits: Mapping[str, ToolRateLimit],
        *,
        default: ToolRateLimit | None = None,
        store: str | None = None,
        on_store_error: OnStoreError | None = None,
        dry_run: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> Self: ...
    @classmethod
    def from_file(
        cls, path: str | PathLike[str], *, clock: Callable[[], float] | None = None
    ) -> Self:
        """Makes a limiter from a TOML file of limits.

        `callgate check FILE` says which limits it really puts in force, and `callgate schema` what
        may stand in it.

        Args:
            path: The file, of at most 1 MiB.
            clock: As in `Limiter`.

        Raises:
            ConfigError: If the file cannot be read or anything in it is refused: the message has all
                faults, each with its line.

        Example:
            >>> from pathlib import Path
            >>> from tempfile import TemporaryDirectory
            >>> from callgate import Limiter
            >>> with TemporaryDirectory() as folder:
            ...     file = Path(folder, "limits.toml")
            ...     _ = file.write_text("limits.search = { rate = '300/min', burst = 20 }")
            ...     limiter = Limiter.from_file(file)
            >>> limiter
            Limiter({'search': ToolRateLimit(requests_per_second=5, burst=20)})
        """

    def try_acquire(
        self, tool: str, *, cost: SupportsIndex = ..., **fields: str | int | None
    ) -> Decision:
        """Decides on one call, at once: never waits for tokens.

        A Redis store is asked, and waited for up to its timeout, unless it is known that it would refuse; other
        threads run meanwhile. In a thread that runs an event loop that would stop the loop, and
        `RuntimeWarning` is given: there, await `acquire`.

        Args:
            tool: The tool's name. One that is no valid Unicode is matched as its replacement text.
            cost: The call's cost in tokens, a whole number of at least 1; by default what the
                limits say. A cost above a limit's burst is refused with the reason ``"cost"``.
            fields: What limits are split by, such as ``tenant="acme"``: any text, however long, or a
                whole number, which counts as its digits. None is as if it were not given. Fields
                that no limit of the tool is split by are not looked at.

        Returns:
            The decision. The tokens are spent when it admits, whatever becomes of the call.

        Raises:
            ConfigError: If the name, the cost or a field is not what it should be, or the injected
                clock returned something else than a finite number.
            StoreError: If a Redis store fails and a limit's `on_store_error` is ``"raise"``, or the
                limiter is closed.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)}, clock=lambda: 0.0)
            >>> limiter.try_acquire("search", cost=3).remaining
            2
            >>> limiter.try_acquire("search", cost=3)
            Decision(admitted=False, tool='search', limit='search', reason='rate', remaining=2, retry_after=1.0)
        """

    def reload(
        self,
        limits_or_path: Mapping[str, ToolRateLimit] | str | PathLike[str],
        *,
        default: ToolRateLimit | None = ...,
        dry_run: bool = ...,
    ) -> None:
        """Puts other limits in force: at once, and for every call from then on.

        A limit with the same name as one before keeps its level in tokens, in every bucket: a lower
        burst cuts it, a higher one adds nothing. Under a new name it starts full. Where other
        fields split a limit than before, all its buckets start as the emptiest of the old.

        Args:
            limits_or_path: The limits by name, or the TOML file that has them. At least one, where there
                is no default: what could not be fetched must not lift every limit.
            default: With a mapping, the limit of all other tools, or None for none; it stays as it
                is where this is left out. A file says it itself.
            dry_run: The same of the dry run. So does the limiter's `on_store_error` stay as it is.

        Raises:
            ConfigError: If anything is not what it should be. The limits before then stay in
                force, untouched.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)}, clock=lambda: 0.0)
            >>> limiter.try_acquire("search").remaining
            4
            >>> limiter.reload({"search": ToolRateLimit(2, burst=100)})
            >>> limiter.snapshot()["search"].remaining
            4
        """

    def snapshot(self) -> dict[str, LimitSnapshot]:
        """What each limit's buckets hold now, by the limit's name. Looking spends nothing.

        The limits are in the order they were given, the one for all other tools last, as
        ``"[default]"``. A Redis store is asked, and waited for up to its timeout, while other threads run.

        Raises:
            StoreError: If the limiter is closed.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)})
            >>> limiter.snapshot()["search"].remaining
            5
        """

    def pause(self, tool: str, seconds: float | SupportsIndex, *, limit: str | None = None) -> None:
        """Admits no call of a tool for some time, since the service behind it asked for that.

        It pauses the limit of the tool that refills fastest, with all its buckets and for all its tools,
        which is enough since all limits must admit a call. When the pause ends, its buckets are empty
        and refill from there; other limits keep their level. Of the default limit only the buckets
        of this tool pause. A pause that ends later stays as it is. Calls that wait and cannot be
        served in time any more are rejected.

        Args:
            tool: The tool's name.
            seconds: How long: above 0, up to 86,400.
            limit: The name of another limit of the tool's, to pause in place of the fastest.

        Raises:
            ConfigError: If no limit holds for the tool, or not the one that is named, or a value is not
                what it should be.
            StoreError: If the limiter is closed.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(2, burst=2)}, clock=lambda: 0.0)
            >>> limiter.pause("search", 10)
            >>> decision = limiter.try_acquire("search")
            >>> decision.reason, decision.retry_after
            ('paused', 10.5)
        """

    def store_counts(self) -> StoreCounts | None:
        """What was asked of a Redis store in this process; None with another store.

        Agent Framework's middleware reports the same to OpenTelemetry, for all limiters of a store together.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> url = "redis://127.0.0.1:1?prefix=example"
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)}, store=url, on_store_error="deny")
            >>> limiter.try_acquire("search").reason  # nobody is there
            'store'
            >>> counts = limiter.store_counts()
            >>> counts.answered, counts.failed, counts.alone, counts.is_down
            (0, 1, 1, True)
        """

    def close(self) -> None:
        """Lets go of a Redis store: its connection and its thread end.

        What was asked before is answered, or late after the store's timeout; nobody waits for that here. From
        now on every call raises `StoreError`, and so do `pause` and `snapshot`; calls that wait for their
        turn are woken to raise it too. It may be called again. With other stores it does nothing.

        Example:
            >>> from callgate import Limiter, StoreError, ToolRateLimit
            >>> url = "redis://127.0.0.1:6379/0?prefix=example"
            >>> with Limiter({"search": ToolRateLimit(1, burst=5)}, store=url) as limiter:
            ...     pass  # limiter.try_acquire("search"), and so on
            >>> try:
            ...     limiter.try_acquire("search")
            ... except StoreError as error:
            ...     print(error)
            the limiter is closed
        """

    def _admit(
        self,
        tool: str,
        context: Any,
        find: Callable[[Any, tuple[str, ...]], Mapping[str, str | int | None]],
        cost: SupportsIndex | None = None,
        traced: TracedCall | None = None,
    ) -> Decision | Turn | None: ...
    def _begin(
        self,
        tool: str,
        cost: SupportsIndex | EllipsisType,
        max_wait: float | None,
        fields: Mapping[str, str | int | None],
    ) -> Decision | Turn: ...
    def _look(self) -> Look | None: ...
    def _snapshot(self, look: Look | None) -> dict[str, LimitSnapshot]: ...
    @property
    def _is_remote(self) -> bool: ...
    @staticmethod
    def _check(
        tool: str,
        cost: SupportsIndex | EllipsisType,
        max_wait: float | None,
        fields: Mapping[str, str | int | None],
    ) -> None: ...

@final
class Look:
    """A look into a store, which has to answer."""

    def asks_at(self) -> int | None:
        """The file descriptor to read from until the store has answered; None once it has."""

@final
class Trace:
    """A file to which a line of JSON is added for each call that has ended: for `callgate simulate`.

    ``{"time":1764489600.25,"tool":"crm_search","fields":{"tenant":"9f86d081884c7d65"},"duration":0.032,"outcome":"ok"}``

    A thread writes it, some 20 ms after a call has ended. No call waits for it: at most 8,192 lines and 8 MiB of
    them wait to be written, and what comes beyond that, or while the file cannot be written, is dropped and
    counted, and a warning is logged. Several traces and processes may write one file: lines stay whole. A forked
    child goes on with a thread of its own. What is left is written when Python ends; before `os._exit`, as
    `multiprocessing` ends its workers, `flush` it.

    Args:
        path: The file; what is in it stays.
        plain_fields: Whether to write the values of fields as they are. By default they are the first 16 hex
            digits of their SHA-256, the same in every process: no secret, since whoever guesses a value can
            tell that it is right.
        rotate_at: How large the file may grow in bytes, 4,096 or more. Then it is renamed to end in ``.1``, older ones
            move on to ``.2`` and so forth, and a new one is begun.
        keep: How many older files are kept, from 1 to 1,000.

    Raises:
        ConfigError: If the file cannot be written or is no plain file, or a value is not what it should be.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from callgate import Trace
        >>> with TemporaryDirectory() as folder:
        ...     trace = Trace(Path(folder, "calls.jsonl"))
        ...     # ToolRateLimitMiddleware(limits, trace=trace), and run the agent; then:
        ...     trace.flush(), trace.dropped
        (True, 0)
    """

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        plain_fields: bool = False,
        rotate_at: SupportsIndex = 67108864,
        keep: SupportsIndex = 8,
    ) -> Self: ...
    @property
    def path(self) -> Path:
        """The file."""

    @property
    def dropped(self) -> int:
        """How many calls of this process have no line, since more ended than could be written, or none could."""

    def flush(self) -> bool:
        """Has all be written whose call has ended by now, and waits for that, no longer than 5 s.

        Returns:
            Whether it was done by then: written, or dropped and counted.
        """

@final
class TracedCall:
    """A call that is traced. It is asked for when `Limiter._admit` is given it."""

    def __new__(cls, trace: Trace) -> Self: ...
    def decided(self, *, admitted: bool, waited: bool) -> None:
        """It runs from now on, or it does not, after it has waited for its turn, if it has."""

    def ended(self, error: BaseException | None = None) -> None:
        """It has ended: well, by an error, or cancelled by what is no `Exception`."""

@final
class Turn:
    """A call that waits for its turn: to be asked until it gives a decision."""

    def ask(self) -> Decision | None:
        """The decision, or None where there is none yet: then sleep, and ask again."""

    def has_waited(self) -> bool:
        """Whether it had to wait for its turn, and not for a store alone."""

    def take_thread(self) -> None:
        """Has it wait in a thread: to be said before it is asked."""

    def asks_at(self) -> int | None:
        """The file descriptor to read from until a store has answered, where one is being asked."""

    def sleep(self, on: Lock) -> float:
        """Sleeps on a lock that is locked: returns how many seconds to wait for it."""

    def leave(self) -> None:
        """Gives up its place."""

@final
class Home:
    """An event loop: when the turns that wait in it are to be woken.

    One timer of the loop's is enough for all of them, and one more for each that is sooner than those before.
    """

    def __new__(cls) -> Home: ...
    def take_in(self, turn: Turn) -> int | None:
        """Has a turn wait here.

        Returns:
            The file descriptor to listen to, where a store is to be asked and the loop does not listen yet.
        """

    def listens(self) -> None:
        """The loop listens."""

    def answered(self) -> list[Future[None]]:
        """The futures of those whom a store has answered."""

    def sleep(self, turn: Turn, on: Future[None]) -> float | None:
        """Sleeps on a future.

        Returns after how many seconds to look for who is due, 0.0 where that is no sooner than before, or
        None where the turn was woken already and does not sleep.
        """

    def due(self) -> tuple[list[Future[None]], float | None]:
        """The futures of those who are due, and after how many seconds to look again.

        None where nobody is left, or where what was set before is no later.
        """

    def close(self) -> None:
        """The event loop is closed: nobody who waits in it will come."""

def after_fork() -> None: ...
def after_fork_in_parent() -> None: ...
def before_fork() -> None: ...
def decision_counts() -> list[tuple[str, str | None, str, int]]: ...
def flush_log() -> None: ...
def flush_traces() -> None: ...
def main(argv: Sequence[str]) -> int: ...
def reset_decision_counts() -> None: ...
def restore_decision(
    tool: str,
    admitted: bool,
    limit: str | None,
    reason: str | None,
    remaining: int | None,
    retry_after: float | None,
) -> Decision: ...
def restore_limit(parts: Mapping[str, object]) -> ToolRateLimit: ...
def store_counts() -> list[tuple[str, StoreCounts]]: ...
