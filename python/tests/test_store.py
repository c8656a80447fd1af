"""One quota for several processes: buckets in shared memory, and whoever forks, dies, stops or waits.

A process of its own is a forked child here that makes its limiter from the store's URL; programs show what
becomes of limiters that were made before a fork, and of whole crowds of processes.
"""

from __future__ import annotations

import asyncio
import copy
import fcntl
import json
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from callgate import ConfigError, Limiter, RateLimitExceeded, ToolRateLimit

from .running import forked, run_program

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux"),
    # From 3.12 on Python warns of any fork of a process that has threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

PROGRAMS = Path(__file__).parent / "programs"

LONG = "CALLGATE_LONG_TESTS" in os.environ
"""Whether to run as many rounds as a night allows."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def url(folder: Path) -> str:
    """The URL of a store that nobody has made."""
    return f"shm:{folder}/quota"


def hourly(burst: int, **options: Any) -> ToolRateLimit:
    """A limit that refills too slowly for a test to see."""
    return ToolRateLimit.parse("1/h", burst, **options)


def in_another(say: Callable[[], object]) -> Any:
    """What another process has to say, which makes its limiters itself."""
    return json.loads(forked(lambda: json.dumps(say()), 20))


def admitted(limiter: Limiter, tool: str = "search", times: int = 1, **options: Any) -> int:
    """How many calls of so many are admitted."""
    return sum(limiter.try_acquire(tool, **options).admitted for _ in range(times))


def file_of(url: str) -> Path:
    """The store's file."""
    return Path(f"{url.removeprefix('shm:')}.v1")


@contextmanager
def locked(url: str) -> Generator[None]:
    """The store as a process leaves it that is stopped at the worst time."""
    descriptor = os.open(file_of(url), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_two_processes_share_what_each_of_them_alone_would_have(url: str) -> None:
    limits = {"search": hourly(5)}
    mine = Limiter(limits, store=url)
    assert admitted(mine, times=2) == 2
    assert in_another(lambda: admitted(Limiter(limits, store=url), times=9)) == 3
    decision = mine.try_acquire("search")
    assert (decision.reason, decision.remaining) == ("rate", 0)
    assert 3000 < (decision.retry_after or 0) <= 3600


def test_what_was_spent_stays_spent_though_no_process_is_left(url: str) -> None:
    def spend() -> int:
        return admitted(Limiter({"search": hourly(5)}, store=url), times=3)

    assert [in_another(spend) for _ in range(3)] == [3, 2, 0]


MIXED = {
    "crm": hourly(6, tools=["crm_*", "lookup"], per=["tenant"]),
    "lookup": hourly(20),
    "pairs": hourly(2, tools="crm_*", per=["tenant", "user"]),
}


def test_all_kinds_of_limits_are_shared(url: str) -> None:
    def spend() -> list[int]:
        limiter = Limiter(MIXED, default=hourly(4), store=url)
        return [
            admitted(limiter, "crm_find", 2, tenant="acme", user="ada"),
            admitted(limiter, "crm_find", 1, tenant="acme", user="alan"),
            admitted(limiter, "crm_find", 1, tenant="acme"),
            admitted(limiter, "lookup", 5, tenant="acme"),
            admitted(limiter, "lookup", 3, tenant="umbrella"),
            admitted(limiter, "send", 2, tenant="acme"),
            admitted(limiter, "other", 1),
        ]

    # Of the tenant's six the calls of three users take four; the fifth and sixth are for lookups.
    assert spend() == [2, 1, 1, 2, 3, 2, 1]
    assert in_another(spend) == [0, 0, 0, 0, 3, 2, 1]
    assert in_another(spend) == [0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_r32_of_two_limits_none_is_charged_where_one_refuses(url: str, *, last: bool) -> None:
    limits = {"user": hourly(1, tools="search", per=["user"]), "search": hourly(100)}
    if last:
        limits = dict(reversed(limits.items()))
    mine = Limiter(limits, store=url)
    assert admitted(mine, times=20, user="ada") == 1
    assert mine.try_acquire("search", user="ada").limit == "user"

    def others() -> int:
        limiter = Limiter(limits, store=url)
        return sum(admitted(limiter, times=3, user=f"user {number}") for number in range(99))

    assert in_another(others) == 99
    assert mine.snapshot()["search"].remaining == 0
    assert mine.try_acquire("search", user="new").limit == "search"


def test_r22_no_two_values_of_fields_share_a_bucket(url: str) -> None:
    long = "x" * (1 << 20)
    pairs: list[tuple[str | None, str | None]] = [
        *(("a:b", "c"), ("a", "b:c"), ("a\0b", "c"), ("x\r\nDEL *", "c"), ("{t}", "c")),
        *(("a}b{c", "d"), ("", "c"), (None, "c"), ("default", "c"), ("c", None), (None, None)),
        *((f"{long}a", "c"), (f"{long}b", "c")),
    ]
    limits = {"search": hourly(1, per=["tenant", "user"])}

    def spend() -> int:
        limiter = Limiter(limits, store=url)
        return sum(admitted(limiter, times=2, tenant=one, user=two) for one, two in pairs)

    assert spend() == len(pairs)
    assert in_another(spend) == 0


def test_r22_limits_of_two_names_share_nothing_but_the_file(url: str) -> None:
    ours = Limiter({"ours": hourly(2, tools="search")}, store=url)
    theirs = Limiter({"theirs": hourly(3, tools="search")}, store=url)
    assert (admitted(ours, times=9), admitted(theirs, times=9)) == (2, 3)


def test_r24_in_a_full_table_a_blocked_tenant_stays_blocked_and_new_ones_share_a_bucket(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter({"search": hourly(1, per=["tenant"])}, store=f"{url}?slots=64")
    assert admitted(limiter, times=3, tenant="blocked") == 1
    asked = 5000
    found = sum(admitted(limiter, tenant=number) for number in range(asked))
    # One for each slot that is left, and one for all who have none.
    assert found <= 64
    assert found > 32
    assert not limiter.try_acquire("search", tenant="blocked")
    assert limiter.snapshot()["search"].buckets <= 64
    [told] = [record.getMessage() for record in caplog.records]
    assert "limit 'search'" in told
    assert "share one bucket" in told


def test_a_pause_holds_in_every_process(url: str) -> None:
    limits = {"search": ToolRateLimit(1000, 100), "other": ToolRateLimit(1000, 100)}
    mine = Limiter(limits, store=url)
    assert mine.try_acquire("search")
    in_another(lambda: Limiter(limits, store=url).pause("search", 500))
    decision = mine.try_acquire("search")
    assert decision.reason == "paused"
    assert 400 < (decision.retry_after or 0) <= 500.001
    assert mine.acquire_sync("search", max_wait=100).reason == "paused"
    assert 400 < (mine.snapshot()["search"].paused or 0) <= 500
    assert mine.try_acquire("other")


def test_a_pause_of_one_default_tool_is_no_other_tools(url: str) -> None:
    def limiter() -> Limiter:
        return Limiter({}, default=ToolRateLimit(1000, 100), store=url)

    mine = limiter()
    in_another(lambda: limiter().pause("send", 500))
    assert mine.try_acquire("send").reason == "paused"
    assert mine.try_acquire("read")


def test_who_waits_is_refused_when_another_process_pauses_beyond_the_bound(url: str) -> None:
    limits = {"search": ToolRateLimit(2, 1)}
    mine = Limiter(limits, store=url)
    assert mine.try_acquire("search")

    async def wait() -> str | None:
        turn = asyncio.create_task(mine.acquire("search", max_wait=20))
        await asyncio.sleep(0)
        in_another(lambda: Limiter(limits, store=url).pause("search", 500))
        return (await turn).reason

    assert asyncio.run(wait()) == "paused"


def test_a_change_that_is_rolled_out_gives_nobody_anything(url: str) -> None:
    old, new = {"search": hourly(10)}, {"search": hourly(4)}
    mine = Limiter(old, store=url)
    assert admitted(mine, times=3) == 3
    # Of the seven that are left, four fit the lower burst.
    assert in_another(lambda: admitted(Limiter(new, store=url))) == 1
    assert mine.try_acquire("search").remaining == 2
    mine.reload(new)
    assert mine.snapshot()["search"].remaining == 2
    assert in_another(lambda: admitted(Limiter(old, store=url), times=9)) == 2
    assert admitted(mine, times=9) == 0


def test_changing_to_and_fro_admits_no_more_than_the_larger_limit(url: str) -> None:
    slow, fast = {"search": hourly(3)}, {"search": hourly(12)}
    mine = Limiter(slow, store=url)
    found = 0
    for _ in range(10):
        mine.reload(fast)
        found += admitted(mine)
        found += in_another(lambda: admitted(Limiter(slow, store=url)))
        mine.reload(slow)
    assert found == 3


def test_a_snapshot_looks_at_what_all_processes_spent_and_spends_nothing(url: str) -> None:
    mine = Limiter(MIXED, store=url)
    in_another(lambda: admitted(Limiter(MIXED, store=url), "lookup", 7, tenant="acme"))
    for _ in range(3):
        snapshot = mine.snapshot()
        assert (snapshot["lookup"].remaining, snapshot["lookup"].buckets) == (14, 1)
        assert (snapshot["crm"].remaining, snapshot["crm"].buckets) == (None, 1)
        assert snapshot["pairs"].buckets == 0


def test_a_cost_beyond_the_burst_is_refused_for_good(url: str) -> None:
    decision = Limiter({"search": hourly(3)}, store=url).try_acquire("search", cost=4)
    assert (decision.reason, decision.retry_after, decision.remaining) == ("cost", None, 3)


def test_a_dry_run_spends_what_it_admits_and_refuses_nothing(url: str) -> None:
    dry = Limiter({"search": hourly(2)}, store=url, dry_run=True)
    found = [dry.try_acquire("search") for _ in range(3)]
    assert [decision.reason for decision in found] == [None, None, "rate"]
    assert all(found)
    assert in_another(lambda: admitted(Limiter({"search": hourly(2)}, store=url))) == 0


def test_in_flight_calls_are_each_processs_own(url: str) -> None:
    limits = {"search": hourly(9, max_concurrent=1)}
    mine = Limiter(limits, store=url)
    with mine.try_acquire("search") as first:
        assert first
        with mine.try_acquire("search") as second:
            assert second.reason == "concurrency"

        def other() -> bool:
            with Limiter(limits, store=url).try_acquire("search") as decision:
                return decision.admitted

        assert in_another(other)
    # The refused call spent nothing.
    assert mine.snapshot()["search"].remaining == 7


def test_the_decorator_shares_too(url: str) -> None:
    limits = {"search": hourly(2)}
    assert in_another(lambda: admitted(Limiter(limits, store=url))) == 1

    @Limiter(limits, store=url).limit("search")
    def search() -> str:
        return "found"

    assert search() == "found"
    with pytest.raises(RateLimitExceeded, match="Rate limit exceeded"):
        search()


def test_a_limiter_is_no_more_copied_or_pickled_than_one_without_a_store(url: str) -> None:
    for limiter in (Limiter({"search": hourly(2)}), Limiter({"search": hourly(2)}, store=url)):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot pickle .*Limiter"):
                attempt(limiter)


def test_decisions_of_a_store_can_be_pickled(url: str) -> None:
    decision = Limiter({"search": hourly(1)}, store=url).try_acquire("search")
    assert repr(pickle.loads(pickle.dumps(decision))) == repr(decision)  # noqa: S301 - our own


def test_the_repr_names_the_store(url: str) -> None:
    limiter = Limiter({"search": ToolRateLimit(2, 2)}, store=url)
    limits = "{'search': ToolRateLimit(requests_per_second=2, burst=2)}"
    assert repr(limiter) == f"Limiter({limits}, store='{url}')"


# In a file


@pytest.mark.parametrize("key", ["url", "url_env"])
def test_a_file_names_the_store_or_the_variable_that_does(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("SHARED_QUOTA", url)
    store = f'{key} = "{url if key == "url" else "SHARED_QUOTA"}"'
    file = tmp_path / "limits.toml"
    file.write_text(f'[store]\n{store}\n[limits.search]\nrate = "1/h"\nburst = 3\n')
    mine = Limiter.from_file(file)
    assert admitted(mine, times=2) == 2
    assert in_another(lambda: admitted(Limiter.from_file(file), times=3)) == 1
    assert in_another(lambda: admitted(Limiter({"search": hourly(3)}, store=url))) == 0
    # The store is the same: it may be reloaded, and gives nobody anything.
    mine.reload(file)
    assert admitted(mine) == 0


def test_a_reload_takes_no_other_store(url: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'[store]\nurl = "{url}-other"\n[limits.search]\nrate = "1/h"\nburst = 9\n')
    for limiter in (Limiter({"search": hourly(2)}, store=url), Limiter({"search": hourly(2)})):
        with pytest.raises(ConfigError, match=r"store must be .* for a reload.*-other'"):
            limiter.reload(file)
        assert limiter.snapshot()["search"].limit == hourly(2)
    assert not file_of(f"{url}-other").exists()


def test_a_reload_that_names_no_store_keeps_it(url: str) -> None:
    limiter = Limiter({"search": hourly(2)}, store=url)
    assert admitted(limiter) == 1
    limiter.reload({"search": hourly(2), "more": hourly(5)})
    assert in_another(lambda: admitted(Limiter({"more": hourly(5)}, store=url), "more", 3)) == 3
    assert admitted(limiter, "more", 9) == 2


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        '[store]\nurl_env = "NO_SUCH_QUOTA"\n[limits.search]\nrate = "1/h"\nburst = 3\n'
    )
    with pytest.raises(
        ConfigError, match=r"url_env .*environment variable that is set.*NO_SUCH_QUOTA"
    ):
        Limiter.from_file(file)


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", r"a store's URL, such as 'shm:/run/myapp/callgate\?slots=65536' or .*, got ''"),
        ("memory", r"a store's URL, .*, got 'memory'"),
        ("file:/dev/shm/x", r"a store's URL, .*, got 'file:/dev/shm/x'"),
        ("redis://127.0.0.1/0", r"made without the feature 'redis', got 'redis://127.0.0.1/0'"),
        ("shm:", r"the whole path of a file, .*, got 'shm:'"),
        ("shm:quota", r"the whole path of a file, .*, got 'shm:quota'"),
        ("shm:/dev/shm/", r"the whole path of a file, .*, got 'shm:/dev/shm/'"),
        ("shm:/dev/shm/a\0b", r"the whole path of a file, .*, got 'shm:/dev/shm/a\\0b'"),
        ("shm:/dev/shm/x?slots=63", r"N from 64 to 16777216, got 'shm:/dev/shm/x\?slots=63'"),
        ("shm:/dev/shm/x?slots=16777217", r"N from 64 to 16777216, got .*=16777217'"),
        ("shm:/dev/shm/x?slots=1e3", r"N from 64 to 16777216, got .*=1e3'"),
        ("shm:/dev/shm/x?slot=64", r"nothing but '\?slots=N' behind it.*, got .*\?slot=64'"),
        ("shm:/no/such/folder/x", r"in a folder that exists, got .*'/no/such/folder/x.v1'"),
        (5, r"a store's URL, such as 'shm:/run/myapp/callgate', got 5"),
        (True, r"a store's URL, .*, got True"),
        (b"shm:/dev/shm/x", r"a store's URL, .*, got b'shm:/dev/shm/x'"),
        (Path("/dev/shm/x"), r"a store's URL, .*, got .*Path\('/dev/shm/x'\)"),  # noqa: S108
    ],
)
def test_a_store_that_is_none_is_refused_with_what_is_allowed(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^store must be .*{message}$"):
        Limiter({"search": hourly(1)}, store=given)


def test_a_clock_of_its_own_is_refused_beside_a_store(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^clock must be left out beside a store: .*, got <"):
        Limiter({"search": hourly(1)}, store=url, clock=lambda: 0.0)
    assert not file_of(url).exists()


def test_limits_that_are_refused_make_no_file(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^name must be"):
        Limiter({"a": hourly(1), " b": hourly(1)}, store=url)
    assert not file_of(url).exists()


def test_r21_the_file_is_its_owners_alone_whatever_the_umask(url: str) -> None:
    before = os.umask(0)
    try:
        Limiter({"search": hourly(1)}, store=url)
    finally:
        os.umask(before)
    assert file_of(url).stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606, 0o400, 0o4600])
def test_r21_a_file_that_others_may_touch_is_refused(url: str, mode: int) -> None:
    Limiter({"search": hourly(1)}, store=url)
    file_of(url).chmod(mode)
    message = rf"^store must be of mode 0600, got {mode:04o}: '{file_of(url)}'$"
    with pytest.raises(ConfigError, match=message):
        Limiter({"search": hourly(1)}, store=url)


def spoil_truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def spoil_short(file: Path) -> None:
    os.truncate(file, 10)


def spoil_empty(file: Path) -> None:
    os.truncate(file, 0)


def spoil_foreign(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(b"foreign!" * (size // 8))


def spoil_link(file: Path) -> None:
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))


def spoil_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def spoil_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def identity(file: Path) -> tuple[int, ...]:
    """Which file it is, and when it was last written."""
    found = file.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_truncated, r"\d+ bytes for 65536 slots, as it says itself, got \d+ bytes"),
        (spoil_short, r"a store of callgate: at least \d+ bytes, got 10 bytes"),
        (spoil_empty, r"a store of callgate: at least \d+ bytes, got 0 bytes"),
        (spoil_foreign, r"a store of callgate, got another kind of file"),
        (spoil_link, r"a regular file, got a symbolic link"),
        (spoil_folder, r"allows to open it, got Is a directory.*"),
        (spoil_pipe, r"a regular file, got something else"),
    ],
)
def test_r21_a_file_that_is_no_store_is_refused_and_left_alone(
    url: str, spoil: Callable[[Path], None], message: str
) -> None:
    in_another(lambda: bool(Limiter({"search": hourly(1)}, store=url)))
    file = file_of(url)
    spoil(file)
    before = identity(file)
    with pytest.raises(ConfigError, match=rf"^store must be .*{message}: '{file}'$"):
        Limiter({"search": hourly(1)}, store=url)
    assert identity(file) == before


def test_a_folder_that_may_not_be_written_is_refused(url: str, folder: Path) -> None:
    folder.chmod(0o555)
    said = in_another(lambda: as_nobody(lambda: refusal(url)))
    assert said.startswith("store must be one that allows to make a file in its folder, got ")
    assert "Permission denied" in said
    assert said.endswith(f": '{file_of(url)}'")


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs to become another user")
def test_r21_the_file_of_another_user_is_refused(url: str, folder: Path) -> None:
    folder.chmod(0o755)
    Limiter({"search": hourly(1)}, store=url)
    file_of(url).chmod(0o666)

    said = (
        f"store must be owned by this process's user (65534), got one of user 0: '{file_of(url)}'"
    )
    assert in_another(lambda: as_nobody(lambda: refusal(url))) == said


def as_nobody(say: Callable[[], str]) -> str:
    """What a process has to say that is not root, whom nothing stops."""
    if os.getuid() == 0:
        os.setuid(65534)
    return say()


def refusal(url: str) -> str:
    """Why a store is refused."""
    with pytest.raises(ConfigError) as caught:
        Limiter({"search": hourly(1)}, store=url)
    return str(caught.value)


def test_who_asks_for_other_slots_gets_those_that_there_are_and_is_told(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    Limiter({"search": hourly(1)}, store=f"{url}?slots=128")
    size = file_of(url).stat().st_size
    Limiter({"search": hourly(1)}, store=url)
    assert not caplog.records
    Limiter({"search": hourly(1)}, store=f"{url}?slots=1024")
    [told] = [record.getMessage() for record in caplog.records]
    assert f"'{file_of(url)}' has 128 slots, not 1024" in told
    assert file_of(url).stat().st_size == size


def test_a_store_that_is_removed_is_told_once_and_goes_on(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter({"search": hourly(2)}, store=url)
    file_of(url).unlink()
    for _ in range(3):
        limiter.snapshot()
    [told] = [record.getMessage() for record in caplog.records]
    assert f"'{file_of(url)}' was removed" in told
    assert admitted(limiter, times=3) == 2
    # Whoever starts now begins a new one.
    assert admitted(Limiter({"search": hourly(2)}, store=url), times=3) == 2


def test_a_removed_store_is_noticed_by_calls_that_need_no_lock(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter({"search": hourly(2)}, store=url)
    file_of(url).unlink()
    assert admitted(limiter, times=5000) == 2
    [told] = [record.getMessage() for record in caplog.records]
    assert f"'{file_of(url)}' was removed" in told


# Whoever has the lock and stops


def test_while_the_lock_cannot_be_had_calls_that_need_it_are_refused_and_others_go_on(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"one": hourly(9), "two": hourly(9), "both": hourly(9, tools="two")}
    mine = Limiter(limits, store=url)
    with locked(url):
        assert mine.try_acquire("one")
        refused = [
            mine.try_acquire("two"),
            mine.acquire_sync("two", max_wait=60),
            asyncio.run(mine.acquire("two", max_wait=60)),
        ]
        assert mine.try_acquire("one")
    for decision in refused:
        assert not decision
        assert (decision.reason, decision.retry_after) == ("store", None)
        assert pickle.loads(pickle.dumps(decision)).reason == "store"  # noqa: S301 - our own
    said = "The rate limit of tool 'two' cannot be checked at the moment. Retry later."
    assert str(RateLimitExceeded(refused[0])) == said
    assert mine.try_acquire("two")
    assert mine.snapshot()["two"].remaining == 8
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "cannot be locked: it has been locked by" in told[0]
    assert "can be locked again" in told[1]


def test_a_dry_run_lets_pass_what_the_store_cannot_decide(url: str) -> None:
    limits = {"two": hourly(9), "both": hourly(9, tools="two")}
    dry = Limiter(limits, store=url, dry_run=True)
    with locked(url):
        decision = dry.try_acquire("two")
    assert (decision.admitted, decision.reason) == (True, "store")


def test_r21_a_process_that_is_stopped_with_the_lock_stops_nobody(url: str) -> None:
    said = json.loads(run_program(PROGRAMS / "store_stopped.py", url))
    assert said["stopped"] == "store"
    assert said["alone"] is True
    assert said["resumed"] is None
    assert said["seconds"] < 1


# Whoever forks, and whoever is started


def test_r19_children_answer_at_once_whenever_they_are_forked(url: str) -> None:
    said = json.loads(run_program(PROGRAMS / "store_fork.py", url, warnings="ignore"))
    assert said["children"] == 40
    assert said["odd"] == []
    assert said["slowest"] < 1
    # Children and children's children share what their parent has.
    assert said["admitted"] == said["burst"]
    assert said["parent"] is True


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_r19_pools_of_processes_share_one_quota(url: str, method: str) -> None:
    said = json.loads(run_program(PROGRAMS / "store_start.py", url, method, warnings="ignore"))
    assert said["admitted"] == {"search": 50, "tenants": 3 * 7, "many": 40, "other": 11}
    assert said["processes"] > 1
    assert said["remaining"] == {"search": 0, "many": 0}


def test_r21_whoever_is_killed_holds_nobody_up_and_fills_no_bucket(url: str) -> None:
    rounds = 200 if LONG else 25
    said = json.loads(
        run_program(PROGRAMS / "store_killed.py", url, str(rounds), warnings="ignore")
    )
    assert said["slowest"] < 1
    assert said["odd"] == 0
    for name, (recorded, spent) in said["spent"].items():
        # Whoever is killed between a decision and its record was admitted one call that nobody noted; of
        # several limits it may have charged some.
        assert recorded <= spent <= recorded + rounds, name
    assert said["full"] == []


def test_r21_processes_that_wait_share_one_quota_and_all_are_served(url: str) -> None:
    said = json.loads(run_program(PROGRAMS / "store_waiting.py", url, warnings="ignore"))
    assert said["late"] == []
    assert said["admitted"] == said["asked"]
    assert said["over"] == []


def test_threads_of_one_process_share_the_burst_with_another(url: str) -> None:
    limits = {"search": hourly(3000), "all": hourly(5000, tools="*")}
    mine = Limiter(limits, store=url)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(admitted(mine, times=1000))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    theirs = in_another(lambda: admitted(Limiter(limits, store=url), times=1000))
    for thread in threads:
        thread.join()
    assert sum(counts) + theirs == 3000
