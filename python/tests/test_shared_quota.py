"""One quota for several processes, in either store that they may share.

A process of its own is a forked child here that makes its limiter from the store's URL.
"""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from callgate import Limiter, RateLimitExceeded, ToolRateLimit

from .quotas import MIXED, admitted, hourly, in_another
from .running import run_program

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    # From 3.12 on Python warns of any fork of a process that has threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(params=["shm", "redis"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store that nobody has used."""
    if request.param == "redis":
        yield request.getfixturevalue("redis_url")
        return
    if sys.platform != "linux":
        pytest.skip("shared memory is for Linux")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield f"shm:{name}/quota"


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


def test_r22_limits_of_two_names_share_nothing_but_the_store(url: str) -> None:
    ours = Limiter({"ours": hourly(2, tools="search")}, store=url)
    theirs = Limiter({"theirs": hourly(3, tools="search")}, store=url)
    assert (admitted(ours, times=9), admitted(theirs, times=9)) == (2, 3)


def pause(limiter: Limiter, tool: str) -> None:
    """Pauses a tool, and sees to it that the store knows before the process ends."""
    limiter.pause(tool, 500)
    # What is asked afterwards comes there afterwards.
    limiter.snapshot()
    limiter.try_acquire("another")


def test_a_pause_holds_in_every_process(url: str) -> None:
    limits = {"search": ToolRateLimit(1000, 100), "other": ToolRateLimit(1000, 100)}
    mine = Limiter(limits, store=url)
    assert mine.try_acquire("search")
    in_another(lambda: pause(Limiter(limits, store=url), "search"))
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
    in_another(lambda: pause(limiter(), "send"))
    assert mine.try_acquire("send").reason == "paused"
    assert mine.try_acquire("read")


def test_who_waits_is_refused_when_another_process_pauses_beyond_the_bound(url: str) -> None:
    limits = {"search": ToolRateLimit(2, 1)}
    mine = Limiter(limits, store=url)
    assert mine.try_acquire("search")

    async def wait() -> str | None:
        turn = asyncio.create_task(mine.acquire("search", max_wait=20))
        await asyncio.sleep(0)
        in_another(lambda: pause(Limiter(limits, store=url), "search"))
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
    found = admitted(mine)
    for _ in range(10):
        mine.reload(fast)
        found += admitted(mine)
        found += in_another(lambda: admitted(Limiter(slow, store=url)))
        mine.reload(slow)
    assert found == 3


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


def test_a_reload_that_names_no_store_keeps_it(url: str) -> None:
    limiter = Limiter({"search": hourly(2)}, store=url)
    assert admitted(limiter) == 1
    limiter.reload({"search": hourly(2), "more": hourly(5)})
    assert in_another(lambda: admitted(Limiter({"more": hourly(5)}, store=url), "more", 3)) == 3
    assert admitted(limiter, "more", 9) == 2


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


def test_r21_processes_that_wait_share_one_quota_and_all_are_served(url: str) -> None:
    said = json.loads(run_program(PROGRAMS / "store_waiting.py", url, warnings="ignore"))
    assert said["late"] == []
    assert said["admitted"] == said["asked"]
    assert said["over"] == []
