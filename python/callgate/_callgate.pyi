"""The extension module: the core's types."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, SupportsIndex, final

__all__ = [
    "Decision",
    "LimitSnapshot",
    "Limiter",
    "ToolRateLimit",
    "__version__",
    "decision_counts",
    "main",
    "reset_decision_counts",
    "restore_decision",
]

__version__: str

@final
class ToolRateLimit:
    """A tool's rate limit: a token bucket with a rate and a burst (its capacity). It starts full.

    In any window of W seconds at most ``burst + requests_per_second * W`` calls are admitted, so
    2 a second with burst 2 lets 4 calls into one second. Immutable, hashable, equal by value,
    picklable.

    A float means its shortest decimal: 0.1 is one tenth, not the binary number beside it.

    Args:
        requests_per_second: How fast the bucket refills, in tokens a second: from 1 per 366 days
            (about 3.17e-8) to 1,000,000,000.
        burst: How many tokens it holds: a whole number from 1 to 4,294,967,295.

    Raises:
        ConfigError: If a value is not a number or out of range.

    Example:
        >>> from callgate import ToolRateLimit
        >>> ToolRateLimit(requests_per_second=2, burst=2)
        ToolRateLimit(requests_per_second=2, burst=2)
        >>> ToolRateLimit.per_minute(100, burst=5)
        ToolRateLimit.parse('100/min', burst=5)
    """

    def __new__(
        cls, requests_per_second: float | SupportsIndex, burst: SupportsIndex
    ) -> ToolRateLimit: ...
    @classmethod
    def per_minute(
        cls, requests_per_minute: float | SupportsIndex, burst: SupportsIndex
    ) -> ToolRateLimit:
        """A limit of so many requests a minute.

        Args:
            requests_per_minute: Tokens a minute, in the same range as `requests_per_second`.
            burst: How many tokens the bucket holds.

        Raises:
            ConfigError: If a value is not a number or out of range.

        Example:
            >>> from callgate import ToolRateLimit
            >>> ToolRateLimit.per_minute(30, burst=5).requests_per_second
            0.5
        """

    @classmethod
    def parse(cls, rate: str, burst: SupportsIndex) -> ToolRateLimit:
        """A limit whose rate is written as services write it.

        Args:
            rate: ``N/s``, ``N/min``, ``N/h`` or ``N/day``, with N a decimal of up to 18 digits.
            burst: How many tokens the bucket holds.

        Raises:
            ConfigError: If the rate cannot be read, or a value is out of range.

        Example:
            >>> from callgate import ToolRateLimit
            >>> ToolRateLimit.parse("300/min", burst=20) == ToolRateLimit(5, burst=20)
            True
        """

    @property
    def requests_per_second(self) -> float:
        """The rate in tokens a second, as the nearest float."""

    @property
    def burst(self) -> int:
        """The bucket's capacity in tokens."""

    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[[str, int], ToolRateLimit], tuple[str, int]]: ...

@final
class Decision:
    """Whether a call may run now. True where it may.

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
        """Whether the call may run; its tokens are then spent."""

    @property
    def tool(self) -> str:
        """The tool that was asked for."""

    @property
    def limit(self) -> str | None:
        """The name of the limit that refused the call; None where it was admitted."""

    @property
    def reason(self) -> Literal["rate", "cost"] | None:
        """Why it was refused: too few tokens now, or a cost above the burst. None where admitted."""

    @property
    def remaining(self) -> int | None:
        """The whole tokens left in the bucket; None where the tool has no limit."""

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before the same call can be admitted, if nobody else spends.

        Never 0. None where the call was admitted, and where no wait helps. For an injected
        clock, a call at ``clock() + retry_after`` (as floats) is admitted.
        """

    def __bool__(self) -> bool: ...
    def __reduce__(self) -> tuple[Callable[..., Decision], tuple[object, ...]]: ...

@final
class LimitSnapshot:
    """A limit, and what its bucket holds.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> Limiter({"search": ToolRateLimit(1, burst=5)}).snapshot()["search"]
        LimitSnapshot(limit=ToolRateLimit(requests_per_second=1, burst=5), remaining=5)
    """

    @property
    def limit(self) -> ToolRateLimit:
        """The limit."""

    @property
    def remaining(self) -> int:
        """The whole tokens in the bucket."""

@final
class Limiter:
    """Decides whether a tool's call may run now.

    One instance may be used from any number of threads and event loops at once; it belongs to none
    of them. A forked child goes on with a copy: from then on the two count apart.

    Args:
        limits: The limit of each tool, by the tool's exact name. A tool that is not named is not
            limited.
        clock: A callable that returns the time in seconds as a float, as `time.monotonic` does;
            for tests that move time. Readings count in whole nanoseconds. One that is up to 2 s
            below the highest so far counts as the highest; after a larger step back, time goes on
            from the new reading, and nothing is gained or lost by the step. A reading 2^63 ns (292
            years) or more from the first is refused. By default the operating system's monotonic
            clock, which need not count the time asleep. (Do not leave a daemon thread inside a
            clock of your own when the interpreter exits: that can abort the process.)

    Raises:
        ConfigError: If a limit or the clock is not what it should be.

    Example:
        >>> from callgate import Limiter, ToolRateLimit
        >>> limiter = Limiter({"search": ToolRateLimit(10, burst=10)})
        >>> if limiter.try_acquire("search"):
        ...     print("run the tool")
        run the tool
    """

    def __new__(
        cls,
        limits: Mapping[str, ToolRateLimit],
        *,
        clock: Callable[[], float] | None = None,
    ) -> Limiter: ...
    def try_acquire(self, tool: str, *, cost: SupportsIndex = 1) -> Decision:
        """Decides on one call, at once.

        Args:
            tool: The tool's name.
            cost: The call's cost in tokens, a whole number of at least 1. A cost above the burst
                is refused with the reason ``"cost"``.

        Returns:
            The decision. The tokens are spent when it admits, whatever becomes of the call.

        Raises:
            ConfigError: If the cost or the name is not what it should be, or the injected clock
                returned something else than a finite number.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)}, clock=lambda: 0.0)
            >>> limiter.try_acquire("search", cost=3).remaining
            2
            >>> limiter.try_acquire("search", cost=3)
            Decision(admitted=False, tool='search', limit='search', reason='rate', remaining=2, retry_after=1.0)
        """

    def snapshot(self) -> dict[str, LimitSnapshot]:
        """What each limit's bucket holds now, by the limit's name. Looking spends nothing.

        Example:
            >>> from callgate import Limiter, ToolRateLimit
            >>> limiter = Limiter({"search": ToolRateLimit(1, burst=5)})
            >>> limiter.snapshot()["search"].remaining
            5
        """

    def _admit(self, tool: str) -> Decision | None: ...

def decision_counts() -> list[tuple[str, str, str, int]]: ...
def main(argv: Sequence[str]) -> int: ...
def reset_decision_counts() -> None: ...
def restore_decision(
    tool: str,
    limit: str | None,
    reason: str | None,
    remaining: int | None,
    retry_after: float | None,
) -> Decision: ...
