"""One quota for several processes: buckets in shared memory, and whoever forks, dies, stops or waits.

A process of its own is a forked child here that makes its limiter from the store's URL; programs show what
becomes of limiters that were made before a fork, and of whole crowds of processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from callgate import ConfigError, Limiter, RateLimitExceeded, ToolRateLimit

from .quotas import MIXED, admitted, hourly, in_another
from .running import run_program

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


def test_a_snapshot_looks_at_what_all_processes_spent_and_spends_nothing(url: str) -> None:
    mine = Limiter(MIXED, store=url)
    in_another(lambda: admitted(Limiter(MIXED, store=url), "lookup", 7, tenant="acme"))
    for _ in range(3):
        snapshot = mine.snapshot()
        assert (snapshot["lookup"].remaining, snapshot["lookup"].buckets) == (14, 1)
        assert (snapshot["crm"].remaining, snapshot["crm"].buckets) == (None, 1)
        assert snapshot["pairs"].buckets == 0


def test_the_repr_names_the_store(url: str) -> None:
    limiter = Limiter({"search": ToolRateLimit(2, 2)}, store=url)
    limits = "{'search': ToolRateLimit(requests_per_second=2, burst=2)}"
    assert repr(limiter) == f"Limiter({limits}, store='{url}')"


# In a file


def test_a_reload_takes_no_other_store(url: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(f'[store]\nurl = "{url}-other"\n[limits.search]\nrate = "1/h"\nburst = 9\n')
    for limiter in (Limiter({"search": hourly(2)}, store=url), Limiter({"search": hourly(2)})):
        with pytest.raises(ConfigError, match=r"store must be .* for a reload.*-other'"):
            limiter.reload(file)
        assert limiter.snapshot()["search"].limit == hourly(2)
    assert not file_of(f"{url}-other").exists()


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
        ("shm:", r"the whole path of a file, .*, got 'shm:'"),
        ("shm:quota", r"the whole path of a file, .*, got 'shm:quota'"),
        ("shm:/dev/shm/", r"the whole path of a file, .*, got 'shm:/dev/shm/'"),
        ("shm:/dev/shm/a\0b", r"the whole path of a file, .*, got 'shm:/dev/shm/a\\0b'"),
        ("shm:/dev/shm/x?slots=63", r"N from 64 to 16777216, got 'shm:/dev/shm/x\?slots=63'"),
        ("shm:/dev/shm/x?slots=16777217", r"N from 64 to 16777216, got .*=16777217'"),
        ("shm:/dev/shm/x?slots=1e3", r"N from 64 to 16777216, got .*=1e3'"),
        ("shm:/dev/shm/x?slot=64", r"nothing but '\?slots=N' behind it.*, got .*\?slot=64'"),
        ("shm:/no/such/folder/x", r"in a folder that exists, got .*'/no/such/folder/x.v1'"),
        (
            5,
            r"a store's URL as a str, such as 'shm:/run/myapp/callgate' or .*, got a value of type int",
        ),
        (True, r"a store's URL as a str, .*, got a value of type bool"),
        (b"shm:/dev/shm/x", r"a store's URL as a str, .*, got a value of type bytes"),
        (Path("/dev/shm/x"), r"a store's URL as a str, .*, got a value of type \w*Path"),  # noqa: S108
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
