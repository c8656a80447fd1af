"""Limits from a file, and other limits put in force while calls go on (R48, R49)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callgate import ConfigError, Limiter, ToolRateLimit

from .clocks import FakeClock
from .running import THREADS, forked, hammer

HOUR = 3600.0

FILE = """
dry_run = false

[limits.search]
rate = "1/h"
burst = 3

[limits.crm]
tools = ["crm_*", "lookup"]
quota = "100/min"
burst = 20
per = ["tenant"]
cost = 2

[default]
requests_per_second = 10
burst = 10
"""

IN_FORCE = {
    "search": ToolRateLimit.parse("1/h", 3),
    "crm": ToolRateLimit.quota(
        100, "min", 20, tools=["crm_*", "lookup"], fields=["tenant"], cost=2
    ),
    "[default]": ToolRateLimit(10, 10),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of limits."""
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    return path


def in_force(limiter: Limiter) -> dict[str, ToolRateLimit]:
    """The limits in force, by name."""
    return {name: snapshot.limit for name, snapshot in limiter.snapshot().items()}


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly to matter."""
    return ToolRateLimit.parse("1/h", burst, **options)


def drained(limits: Mapping[str, ToolRateLimit], clock: FakeClock, **options: Any) -> Limiter:
    """A limiter whose tool `search` has nothing left."""
    limiter = Limiter(limits, clock=clock, **options)
    while limiter.try_acquire("search"):
        pass
    return limiter


def wait_of(limiter: Limiter, tool: str = "search", **fields: Any) -> float | None:
    """How long a refused call is told to wait."""
    decision = limiter.try_acquire(tool, **fields)
    assert not decision
    return decision.retry_after


def refusal(act: Callable[[], object]) -> str:
    """The message that something is refused with."""
    with pytest.raises(ConfigError) as refused:
        act()
    return str(refused.value)


# --- from a file ---------------------------------------------------------------------------------


def test_a_file_says_what_python_says(file: Path, clock: FakeClock) -> None:
    for path in (file, str(file), os.fspath(file)):
        limiter = Limiter.from_file(path, clock=clock)
        assert in_force(limiter) == IN_FORCE
        others = {name: limit for name, limit in IN_FORCE.items() if name != "[default]"}
        assert repr(limiter) == repr(Limiter(others, default=IN_FORCE["[default]"]))
    assert limiter.try_acquire("search").remaining == 2
    assert wait_of(limiter, "search", cost=3) == HOUR
    assert limiter.try_acquire("crm_a", tenant="acme").remaining == 18
    assert limiter.try_acquire("lookup", tenant="umbrella").remaining == 18
    assert limiter.try_acquire("other").remaining == 9
    clock.advance(HOUR)
    assert limiter.snapshot()["search"].remaining == 3


def test_a_files_limiter_reads_the_real_clock_by_itself(file: Path) -> None:
    limiter = Limiter.from_file(file)
    assert limiter.try_acquire("search", cost=3)
    wait = wait_of(limiter)
    assert wait is not None
    assert HOUR - 60 < wait <= HOUR


def test_a_file_may_ask_for_a_dry_run(file: Path, clock: FakeClock) -> None:
    file.write_text(FILE.replace("false", "true"))
    limiter = Limiter.from_file(file, clock=clock)
    assert all(limiter.try_acquire("search") for _ in range(9))
    file.write_text(FILE)
    limiter.reload(file)
    assert wait_of(limiter) == HOUR


BAD_FILES = [
    ('[limits.search]\nrate = "1/h"\nbrust = 5\n', "limits.toml:3:1"),
    ('[limits.search]\nrate = "1/h"\nburst = 1\n[limits.search]\n', "limits.toml:4"),
    ("[limits.search]\nburst = 5\n", "limits.toml:1"),
    ('[limits.search]\nrate = "10 per fortnight"\nburst = 5\n', "limits.toml:2"),
    ("[limits.search]\nrequests_per_second = true\nburst = 5\n", "limits.toml:2"),
    ("[limits.search]\nrequests_per_second = nan\nburst = 5\n", "limits.toml:2"),
    ('[limits."a["]\nrate = "1/h"\nburst = 5\n', "a["),
    ('dry_run = "yes"\n', "limits.toml:1"),
    ('on_eror = "closed"\n', "on_eror"),
    ("", "limit nothing"),
    ("\n# nothing\n", "limit nothing"),
    ("[limits.sea", "limits.toml:1"),
    (FILE[: len(FILE) // 2], "limits.toml"),
]


@pytest.mark.parametrize(("text", "said"), BAD_FILES, ids=[ascii(text) for text, _ in BAD_FILES])
def test_r48_r49_a_bad_file_is_refused_and_leaves_all_as_it_was(
    text: str, said: str, file: Path, clock: FakeClock
) -> None:
    limiter = Limiter.from_file(file, clock=clock)
    assert limiter.try_acquire("search", cost=3)
    before = repr(limiter)
    file.write_text(text)
    for act in (lambda: Limiter.from_file(file), lambda: limiter.reload(file)):
        message = refusal(act)
        assert said in message
        assert str(file) in message
        assert "error" in message
    assert repr(limiter) == before
    assert wait_of(limiter) == HOUR


def test_r49_a_file_that_cannot_be_read_leaves_all_as_it_was(file: Path, clock: FakeClock) -> None:
    limiter = Limiter.from_file(file, clock=clock)
    assert limiter.try_acquire("search", cost=3)
    file.unlink()
    missing = file.with_name("no such file")
    for path in (file, file.parent, missing, f"{file}\0"):
        for act in (
            lambda path=path: Limiter.from_file(path),
            lambda path=path: limiter.reload(path),
        ):
            assert "the file cannot be read" in refusal(act)
    file.write_bytes(FILE.encode("utf-16"))
    assert "not UTF-8" in refusal(lambda: limiter.reload(file))
    assert wait_of(limiter) == HOUR
    assert in_force(limiter) == IN_FORCE


@pytest.mark.parametrize("path", [5, None, b"limits.toml", ["limits.toml"], 1.5], ids=repr)
def test_a_path_is_a_text_or_a_path(path: Any) -> None:
    assert refusal(lambda: Limiter.from_file(path)) == (
        f"path must be a file's path: a str or a pathlib.Path, got {path!r}"
    )
    limiter = Limiter({"search": hourly(1)})
    assert refusal(lambda: limiter.reload(path)) == (
        "limits_or_path must be a mapping of names to ToolRateLimit, or a file's path, "
        f"got {path!r}"
    )
    assert in_force(limiter) == {"search": hourly(1)}


def test_a_path_of_no_unicode_is_a_path(file: Path) -> None:
    odd = os.fsdecode(os.fsencode(file.parent) + b"/\xff.toml")
    file.rename(odd)
    assert in_force(Limiter.from_file(odd)) == IN_FORCE


# --- reload --------------------------------------------------------------------------------------


def test_r49_ten_reloads_of_the_same_file_change_nothing(file: Path, clock: FakeClock) -> None:
    limiter = Limiter.from_file(file, clock=clock)
    assert limiter.try_acquire("search", cost=3)
    for _ in range(10):
        assert limiter.try_acquire("crm_a", tenant="acme")
    waits = [wait_of(limiter), wait_of(limiter, "crm_a", tenant="acme")]
    for _ in range(10):
        limiter.reload(file)
        assert [wait_of(limiter), wait_of(limiter, "crm_a", tenant="acme")] == waits
    clock.advance(HOUR)
    assert limiter.try_acquire("search").remaining == 0


def test_r49_only_the_limit_that_changed_moves(file: Path, clock: FakeClock) -> None:
    limiter = Limiter.from_file(file, clock=clock)
    assert limiter.try_acquire("search", cost=3)
    assert limiter.try_acquire("other", cost=4)
    file.write_text(FILE.replace("requests_per_second = 10", "requests_per_second = 1"))
    limiter.reload(file)
    assert wait_of(limiter) == HOUR
    assert limiter.try_acquire("other").remaining == 5
    assert wait_of(limiter, "other", cost=7) == pytest.approx(2)


def test_r49_a_file_that_is_swapped_by_a_symlink_is_the_new_one(
    file: Path, clock: FakeClock
) -> None:
    other = file.with_name("other.toml")
    other.write_text("limits.search = { rate = '2/h', burst = 2 }")
    link = file.with_name("current.toml")
    link.symlink_to(file)
    limiter = Limiter.from_file(link, clock=clock)
    assert limiter.try_acquire("search", cost=3)
    swapped = file.with_name("next.toml")
    swapped.symlink_to(other)
    swapped.rename(link)
    limiter.reload(link)
    assert in_force(limiter) == {"search": ToolRateLimit.parse("2/h", 2)}
    assert wait_of(limiter) == HOUR / 2


def test_a_level_is_carried_in_tokens(clock: FakeClock) -> None:
    limiter = Limiter({"search": hourly(10), "kept": hourly(1)}, clock=clock)
    assert limiter.try_acquire("search", cost=4)
    for limit, level in [
        (hourly(100), 6),  # A higher burst adds nothing,
        (ToolRateLimit.parse("1/day", 100), 6),
        (hourly(3), 3),  # a lower one cuts,
        (hourly(10), 3),  # for good.
        (ToolRateLimit.quota(100, "day", 50), 3),
    ]:
        limiter.reload({"search": limit, "kept": hourly(1)})
        assert limiter.snapshot()["search"].remaining == level
    limiter.reload({"renamed": hourly(10, tools=["search"])})
    assert limiter.try_acquire("search").remaining == 9
    limiter.reload({"search": hourly(5)})
    # What is gone is forgotten: a limit that comes back starts full.
    assert limiter.try_acquire("search").remaining == 4


def test_the_new_rate_holds_from_the_next_decision_for_known_keys_too(clock: FakeClock) -> None:
    limiter = Limiter({"search": hourly(1, per=["tenant"])}, clock=clock)
    for tenant in range(100):
        assert limiter.try_acquire("search", tenant=tenant)
    limiter.reload({"search": ToolRateLimit(1, 1, per=["tenant"])})
    assert {wait_of(limiter, tenant=tenant) for tenant in range(100)} == {1.0}
    assert limiter.try_acquire("search", tenant="new")
    clock.advance(1)
    assert all(limiter.try_acquire("search", tenant=tenant) for tenant in range(100))


def test_where_other_fields_split_a_limit_its_buckets_start_as_the_emptiest(
    clock: FakeClock,
) -> None:
    limiter = Limiter({"search": hourly(5, per=["tenant"])}, clock=clock)
    assert limiter.try_acquire("search", tenant="acme", cost=4)
    assert limiter.try_acquire("search", tenant="umbrella", cost=1)
    limiter.reload({"search": hourly(5, per=["user"])})
    for user in ("a", "b", None):
        assert limiter.try_acquire("search", tenant="new", user=user).remaining == 0
        assert not limiter.try_acquire("search", tenant="new", user=user)


def test_the_default_and_the_dry_run_stay_unless_something_is_said(clock: FakeClock) -> None:
    default, other = hourly(2), hourly(5)
    limiter = Limiter({"search": hourly(1)}, default=default, dry_run=True, clock=clock)
    assert limiter.try_acquire("x").remaining == 1

    limiter.reload({"search": hourly(1)})
    assert repr(limiter).endswith(f"default={default!r}, dry_run=True)")
    limiter.reload({"search": hourly(1)}, dry_run=False)
    assert limiter.try_acquire("x").remaining == 0
    assert wait_of(limiter, "x") == HOUR
    limiter.reload({"search": hourly(1)}, default=other)
    assert repr(limiter).endswith(f"default={other!r})")
    assert wait_of(limiter, "x") == HOUR
    limiter.reload({"search": hourly(1)}, default=None)
    assert repr(limiter) == f"Limiter({ {'search': hourly(1)} })"
    assert limiter.try_acquire("x").remaining is None
    limiter.reload({"search": hourly(1)}, default=default, dry_run=True)
    assert repr(limiter).endswith(f"default={default!r}, dry_run=True)")


def test_a_file_says_the_default_and_the_dry_run_itself(file: Path, clock: FakeClock) -> None:
    limiter = Limiter({"a": hourly(1)}, default=hourly(2), dry_run=True, clock=clock)
    before = repr(limiter)
    options: list[dict[str, Any]] = [{"default": hourly(1)}, {"default": None}, {"dry_run": False}]
    for option in options:
        [(name, value)] = option.items()
        assert refusal(partial(limiter.reload, file, **option)) == (
            f"{name} must be left out where a file says it, got {value!r}"
        )
    assert repr(limiter) == before
    file.write_text("limits.search = { rate = '1/h', burst = 3 }")
    limiter.reload(file)
    # What the file does not say is not so.
    assert repr(limiter) == f"Limiter({ {'search': hourly(3)} })"


NO_LIMIT = "limits_or_path must hold at least one limit where there is no default, got"


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_no_limits_at_all_never_replace_some(kind: Any, clock: FakeClock) -> None:
    nothing = kind({})
    limiter = drained({"search": hourly(3)}, clock)
    for options in ({}, {"dry_run": True}, {"default": None}):
        message = refusal(partial(limiter.reload, nothing, **options))
        assert message == f"{NO_LIMIT} {nothing!r}"
    assert in_force(limiter) == {"search": hourly(3)}
    assert wait_of(limiter) == HOUR

    # A default is a limit.
    limiter.reload(nothing, default=hourly(2))
    assert in_force(limiter) == {"[default]": hourly(2)}
    limiter.reload(nothing)
    assert in_force(limiter) == {"[default]": hourly(2)}
    # Who makes a limiter may begin with none.
    assert in_force(Limiter(nothing)) == {}


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        ({"search": 2}, {}, "limit 'search' must be a ToolRateLimit, got 2"),
        ({"search": hourly(1), "a[": hourly(1)}, {}, "name must be a tool's name or a pattern"),
        ({1: hourly(1)}, {}, "a limit's name must be a str"),
        ({"search": hourly(1)}, {"default": 5}, "default must be a ToolRateLimit, got 5"),
        ({}, {"default": hourly(1, tools="a")}, "limit '[default]': tools must be left out"),
        ({}, {"dry_run": None}, "dry_run must be True or False, got None"),
        ({}, {"default": None}, f"{NO_LIMIT} {{}}"),
    ],
    ids=["limit", "name", "text", "default", "tools", "dry_run", "none"],
)
def test_limits_that_are_refused_leave_all_as_it_was(
    limits: Any, options: Any, message: str, clock: FakeClock
) -> None:
    limiter = drained({"search": hourly(3)}, clock, default=hourly(2))
    before = repr(limiter)
    assert refusal(lambda: limiter.reload(limits, **options)).startswith(message)
    assert repr(limiter) == before
    assert wait_of(limiter) == HOUR


def test_what_a_mapping_raises_comes_out_and_leaves_all_as_it_was(clock: FakeClock) -> None:
    class Broken(dict[str, ToolRateLimit]):
        def items(self) -> Any:
            raise OSError("no items")

    limiter = drained({"search": hourly(3)}, clock)
    with pytest.raises(OSError, match="no items"):
        limiter.reload(Broken())
    assert wait_of(limiter) == HOUR


def test_a_clock_that_fails_leaves_all_as_it_was(clock: FakeClock) -> None:
    limiter = drained({"search": hourly(3)}, clock)
    now: Any = "late"
    before, clock.now = clock.now, now
    assert "clock must return seconds" in refusal(lambda: limiter.reload({}))
    clock.now = before
    assert in_force(limiter) == {"search": hourly(3)}


def test_a_limiter_may_be_reloaded_by_its_own_clock_and_by_what_finds_fields(
    clock: FakeClock,
) -> None:
    reloads = 0

    def reload() -> None:
        nonlocal reloads
        if not reloading[0]:
            return
        reloading[0] = False
        reloads += 1
        per = ["tenant"] if reloads % 2 else ["user", "tenant"]
        limiter.reload({"search": hourly(10**6, per=per), f"tool_{reloads}": hourly(1)})
        reloading[0] = True

    def read() -> float:
        reload()
        return clock()

    def find(_context: Any, names: tuple[str, ...]) -> dict[str, str]:
        reload()
        return dict.fromkeys(names, "x")

    reloading = [False]
    limiter = Limiter({"search": hourly(10**6, per=["tenant"])}, clock=read)
    reloading[0] = True
    for number in range(50):
        assert limiter.try_acquire("search", tenant="x")
        assert limiter._admit("search", None, find) is None
        limiter.try_acquire(f"tool_{number}")
        limiter.snapshot()
        limiter.reload({"search": hourly(10**6, per=["tenant"])})
    assert reloads > 150


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("call"), st.integers(1, 3)),
            st.tuples(st.just("wait"), st.integers(0, 40)),
            st.tuples(st.just("reload"), st.sampled_from([(1, 5), (10, 2), (3, 7), (2, 1)])),
        ),
        max_size=60,
    )
)
def test_r49_across_reloads_no_more_is_admitted_than_the_larger_burst_and_rate(
    steps: list[tuple[str, Any]],
) -> None:
    clock = FakeClock()
    limiter = Limiter({"search": ToolRateLimit(1, 5)}, clock=clock)
    rates, bursts, admitted = [1], [5], 0
    for step, value in steps:
        if step == "wait":
            clock.now += value / 64
        elif step == "reload":
            rates.append(value[0])
            bursts.append(value[1])
            limiter.reload({"search": ToolRateLimit(*value)})
        else:
            admitted += value if limiter.try_acquire("search", cost=value) else 0
        assert admitted <= max(bursts) + max(rates) * clock.now


# --- under load ----------------------------------------------------------------------------------


@pytest.mark.parametrize("per", [[], ["tenant"]], ids=["plain", "per tenant"])
def test_r49_reloads_while_others_decide_neither_mint_nor_lose_tokens(
    per: list[str], clock: FakeClock
) -> None:
    limits = [{"search": hourly(burst, per=per)} for burst in (5000, 9000, 6000)]
    limiter = Limiter(limits[0], clock=clock)

    def ask(number: int) -> int:
        admitted = 0
        for call in range(5000):
            admitted += limiter.try_acquire("search", tenant="one").admitted
            if call % 50 == number:
                limiter.reload(limits[call % 3])
        return admitted

    assert hammer(ask) == 5000


def test_r49_no_call_is_answered_by_half_of_new_limits(clock: FakeClock) -> None:
    one = {"one": hourly(1, tools=["search"])}
    both = {**one, "other": hourly(1, tools=["search"])}
    limiter = drained(one, clock)
    stop = threading.Event()

    def keep_reloading() -> None:
        number = 0
        while not stop.is_set():
            limiter.reload(one if number % 2 else both)
            number += 1

    thread = threading.Thread(target=keep_reloading)
    thread.start()
    try:
        found = [limiter.try_acquire("search") for _ in range(20_000)]
    finally:
        stop.set()
        thread.join()
    # The other limit is made anew, and full; the one that stays has nothing left.
    assert {(decision.admitted, decision.limit) for decision in found} == {(False, "one")}


def test_r49_files_are_reloaded_while_four_threads_decide(file: Path) -> None:
    limiter = Limiter.from_file(file)
    assert limiter.try_acquire("search", cost=3)

    def ask(number: int) -> int:
        admitted = 0
        for call in range(2000):
            admitted += limiter.try_acquire("search").admitted
            limiter.try_acquire("crm_a", tenant=call % 100)
            if call % 100 == number:
                if number == 0:
                    with pytest.raises(ConfigError):
                        limiter.reload(file.with_name("no such file"))
                limiter.reload(file)
        return admitted

    assert THREADS == 4
    assert hammer(ask) == 0
    assert in_force(limiter) == IN_FORCE


def test_many_reloads_with_new_names_keep_answering(clock: FakeClock) -> None:
    limiter = Limiter({}, clock=clock)
    for number in range(3000):
        limiter.reload({f"limit_{number}": hourly(2, tools=[f"tool_{number}"])})
        assert limiter.try_acquire(f"tool_{number}", cost=2)
        assert limiter.try_acquire(f"tool_{number}").limit == f"limit_{number}"
        assert limiter.try_acquire(f"tool_{number - 1}").remaining is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_reload_in_a_forked_child_is_the_childs_own(file: Path, clock: FakeClock) -> None:
    limiter = Limiter.from_file(file, clock=clock)
    assert limiter.try_acquire("search", cost=2)

    def child() -> str:
        limiter.reload({"search": hourly(10)})
        return f"{limiter.try_acquire('search').remaining} {list(limiter.snapshot())}"

    assert forked(child, 10) == "0 ['search', '[default]']"
    assert in_force(limiter) == IN_FORCE
    assert limiter.snapshot()["search"].remaining == 1
