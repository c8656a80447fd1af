"""A Redis store from Python: loops, threads and forks that share its one connection, and all that may fail.

What it decides is tested in Rust; what all stores have in common, in `test_shared_quota`.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from callgate import (
    ConfigError,
    Decision,
    Limiter,
    RateLimitExceeded,
    StoreError,
    ToolRateLimit,
    _limiter,
)

from .quotas import admitted, hourly, in_another
from .running import forked, hammer, run_program
from .servers import PATIENCE, Server, cluster

# From 3.12 on Python warns of any fork of a process that has threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

PROGRAMS = Path(__file__).parent / "programs"

NOBODY = "redis://127.0.0.1:1/0?prefix=test"
"""Where nobody listens."""

both_loops = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def until(is_so: Callable[[], bool]) -> None:
    """Waits for what others do."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, "never"
        time.sleep(0.002)


def run_in(new_loop: Callable[[], asyncio.AbstractEventLoop], work: Any) -> Any:
    """Runs a coroutine in a loop of that kind."""
    loop = new_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def ticks(count: int = 50) -> None:
    """Lets a loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


# What is asked, and what is known


def test_what_it_knows_to_be_refused_is_refused_without_asking(server: Server) -> None:
    limiter = Limiter({"search": hourly(2), "dear": hourly(3)}, store=server.url())
    assert admitted(limiter, times=2) == 2
    asked = server.scripts()
    assert admitted(limiter, times=200) == 0

    async def ask() -> list[Decision]:
        return [await limiter.acquire("search", max_wait=5) for _ in range(100)]

    assert not any(asyncio.run(ask()))
    assert limiter.try_acquire("dear", cost=4).reason == "cost"
    assert limiter.try_acquire("free").remaining is None
    assert server.scripts() == asked


def test_to_make_show_and_change_a_limiter_asks_nothing() -> None:
    url = f"{NOBODY}&timeout=60s".replace("//", "//me:secret@")
    limiter = Limiter({"search": hourly(2)}, default=hourly(1), store=url, on_store_error="deny")
    limiter.reload({"search": hourly(3)})
    said = repr(limiter)
    assert "store='redis://127.0.0.1:1/0', on_store_error='deny')" in said
    assert "ToolRateLimit.parse('1/h', burst=3)" in said
    assert "secret" not in said
    counts = limiter.store_counts()
    assert counts is not None
    assert (counts.answered, counts.failed, counts.alone, counts.is_down) == (0, 0, 0, False)
    assert limiter.try_acquire("search").reason == "store"


def test_errors_call_the_class_what_users_call_it() -> None:
    limiter: Any = Limiter({"search": hourly(2)}, store=NOBODY)
    with pytest.raises(
        AttributeError, match=r"^'(callgate\.)?Limiter' object has no attribute 'try_aquire'"
    ):
        limiter.try_aquire("search")
    with pytest.raises(TypeError, match=r"^Limiter.try_acquire\(\) missing 1 required"):
        limiter.try_acquire()


def test_a_reload_keeps_what_is_to_become_of_calls_when_the_store_fails(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    limits = '[limits.search]\nrate = "1/h"\nburst = 3\n'
    file.write_text(f'on_store_error = "deny"\n[store]\nurl = "{NOBODY}"\n{limits}')
    limiter = Limiter.from_file(file)
    limiter.reload({"search": hourly(3)})
    assert limiter.try_acquire("search").reason == "store"
    file.write_text(f'on_store_error = "admit"\n[store]\nurl = "{NOBODY}"\n{limits}')
    limiter.reload(file)
    assert limiter.try_acquire("search")


@pytest.mark.parametrize("given", ["open", "", "Deny", 1, True, b"deny"])
def test_another_policy_is_refused(given: Any) -> None:
    message = rf"^on_store_error must be 'local', 'deny', 'admit' or 'raise', got {given!r}$"
    with pytest.raises(ConfigError, match=message):
        Limiter({"search": hourly(1)}, store=NOBODY, on_store_error=given)
    with pytest.raises(ConfigError, match=message):
        hourly(1, on_store_error=given)


def test_a_limit_with_a_policy_is_a_value_like_any_other() -> None:
    limit = ToolRateLimit(2, burst=2, on_store_error="raise")
    assert repr(limit) == ("ToolRateLimit(requests_per_second=2, burst=2, on_store_error='raise')")
    assert limit.on_store_error == "raise"
    for again in (eval(repr(limit)), pickle.loads(pickle.dumps(limit)), copy.deepcopy(limit)):  # noqa: S301, S307 - our own
        assert again == limit
        assert hash(again) == hash(limit)
    assert limit != ToolRateLimit(2, burst=2)
    assert ToolRateLimit(2, burst=2).on_store_error is None
    made = [
        ToolRateLimit.per_minute(60, 2, on_store_error="admit"),
        ToolRateLimit.parse("1/s", 2, on_store_error="admit"),
        ToolRateLimit.quota(9, "s", on_store_error="admit"),
    ]
    assert {limit.on_store_error for limit in made} == {"admit"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("redis://127.0.0.1/0", r"'\?prefix="),
        ("redis://127.0.0.1/0?prefix=a{b}", r"prefix must be"),
        ("redis://127.0.0.1/0?prefix=a&timeout=0ms", r"timeout"),
        ("redis://me:secret@127.0.0.1/0?prefix=a&x=1", r"'timeout' .*, got 'x'"),
        ("redis://me:secret@host:x/0?prefix=a", r"port|host"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Limiter({"search": hourly(1)}, store=given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("given", [b"redis://u:secret@h/0?prefix=x", Path("redis://u:secret@h/0")])
def test_what_is_no_text_is_refused_without_showing_it(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^store must be .* as a str, .*, got a value of type \w+$"
    ) as caught:
        Limiter({"search": hourly(1)}, store=given)
    assert "secret" not in str(caught.value)


def test_a_snapshot_tells_what_the_server_has(redis_url: str) -> None:
    limiter = Limiter({"search": hourly(5), "crm": hourly(3, per=["tenant"])}, store=redis_url)
    in_another(lambda: admitted(Limiter({"search": hourly(5)}, store=redis_url), times=3))
    snapshot = limiter.snapshot()
    assert (snapshot["search"].remaining, snapshot["crm"].remaining) == (2, None)
    limiter.pause("search", 500)
    paused = limiter.snapshot()["search"].paused
    assert paused is not None
    assert 400 < paused <= 500


# Event loops


@both_loops
def test_a_loop_goes_round_while_the_server_stands_still(
    server: Server, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    limiter = Limiter({"search": hourly(5)}, store=server.url())

    async def work() -> list[str]:
        events = []
        assert await limiter.acquire("search")
        server.halt()
        asked = [asyncio.ensure_future(limiter.acquire("search")) for _ in range(3)]
        await ticks()
        events.append("ticked" if not any(call.done() for call in asked) else "stopped")
        server.resume()
        events += ["admitted" if call else "rejected" for call in await asyncio.gather(*asked)]
        return events

    assert run_in(new_loop, work()) == ["ticked", *["admitted"] * 3]


def test_answers_that_come_together_wake_a_loop_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Limiter({"search": hourly(5000)}, store=server.url())
    woken: list[int] = []
    wake = _limiter._wake_answered

    def counted(home: Any) -> None:
        woken.append(1)
        wake(home)

    monkeypatch.setattr(_limiter, "_wake_answered", counted)

    async def work() -> int:
        assert await limiter.acquire("search")
        server.halt()
        asked = [asyncio.ensure_future(limiter.acquire("search")) for _ in range(1000)]
        await ticks()
        woken.clear()
        server.resume()
        return sum(map(bool, await asyncio.gather(*asked)))

    assert asyncio.run(work()) == 1000
    # So many at most go out together, and the first of them alone.
    assert len(woken) < 100


@both_loops
def test_r12_loops_of_several_threads_share_one_limiter(
    redis_url: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    limiter = Limiter({"search": hourly(300), "all": hourly(10_000, tools="*")}, store=redis_url)

    async def work() -> int:
        found = 0
        for _ in range(10):
            found += sum(await asyncio.gather(*(ask() for _ in range(20))))
        return found

    async def ask() -> bool:
        return bool(await limiter.acquire("search"))

    assert hammer(lambda _number: run_in(new_loop, work())) == 300
    assert [run_in(new_loop, work()) for _ in range(3)] == [0, 0, 0]


@both_loops
def test_calls_wait_for_their_turn(
    redis_url: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    # Shorter than the store may take to answer whoever comes first.
    limiter = Limiter({"search": ToolRateLimit(100, 1, max_wait=10)}, store=redis_url)

    async def work() -> list[int]:
        served: list[int] = []

        async def ask(number: int) -> None:
            assert await limiter.acquire("search")
            served.append(number)

        await asyncio.gather(*(ask(number) for number in range(20)))
        return served

    assert run_in(new_loop, work()) == list(range(20))


@pytest.mark.parametrize("seed", range(10))
def test_r13_whoever_is_cancelled_at_any_point_is_in_nobodys_way(redis_url: str, seed: int) -> None:
    chance = random.Random(seed)
    limits = {"search": ToolRateLimit(400, 1, max_wait=60, max_concurrent=3)}
    limiter = Limiter(limits, store=redis_url)

    async def ask() -> None:
        with await limiter.acquire("search") as decision:
            assert decision
            await ticks(chance.randrange(3))

    async def work() -> None:
        calls = [asyncio.ensure_future(ask()) for _ in range(60)]
        for call in chance.sample(calls, 30):
            await ticks(chance.randrange(5))
            if chance.random() < 0.2:
                await asyncio.sleep(0.003)
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ended} <= {type(None), asyncio.CancelledError}
        assert sum(end is None for end in ended) >= 30
        # All permits are back.
        running = [await limiter.acquire("search") for _ in range(3)]
        assert all(running)
        assert (await limiter.acquire("search", max_wait=0)).reason == "concurrency"
        for decision in running:
            with decision:
                pass

    asyncio.run(work())


def test_who_is_cancelled_while_the_store_is_asked_spends_at_most_its_token(server: Server) -> None:
    limiter = Limiter({"search": hourly(100)}, store=server.url())

    async def work() -> None:
        await limiter.acquire("search")
        server.halt()
        calls = [asyncio.ensure_future(limiter.acquire("search")) for _ in range(50)]
        await ticks()
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ended} == {asyncio.CancelledError}
        server.resume()
        assert await limiter.acquire("search")

    asyncio.run(work())
    remaining = limiter.snapshot()["search"].remaining
    assert remaining is not None
    assert 48 <= remaining <= 98


@both_loops
def test_a_loop_that_is_closed_with_calls_at_the_server_leaves_nothing(
    server: Server, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    limits = {"search": hourly(100, max_concurrent=5)}
    limiter = Limiter(limits, store=server.url())
    with run_in(new_loop, limiter.acquire("search")) as decision:
        assert decision
    server.halt()
    loop = new_loop()
    calls = [loop.create_task(limiter.acquire("search")) for _ in range(5)]
    loop.run_until_complete(ticks())
    loop.close()
    server.resume()
    while calls:
        # Nobody is to be told of it.
        calls.pop()._log_destroy_pending = False  # type: ignore[attr-defined]
    del loop
    gc.collect()

    async def work() -> int:
        found = [await limiter.acquire("search", max_wait=PATIENCE) for _ in range(5)]
        for decision in found:
            with decision:
                pass
        return sum(map(bool, found))

    assert run_in(new_loop, work()) == 5


def test_a_loop_that_cannot_listen_is_told_what_to_do(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        monkeypatch.setattr(loop, "add_reader", partial(asyncio.AbstractEventLoop.add_reader, loop))
        return loop

    limiter = Limiter({"search": hourly(5)}, store=redis_url)

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"no add_reader: await asyncio.to_thread"):
                await limiter.acquire("search")
        assert await asyncio.to_thread(limiter.acquire_sync, "search")

    run_in(deaf, work())


async def test_to_stop_a_loop_for_an_answer_is_warned_of(server: Server) -> None:
    limiter = Limiter({"search": hourly(5)}, store=server.url())
    for name in ("try_acquire", "acquire_sync"):
        server.halt()
        later = threading.Timer(0.05, server.resume)
        later.start()
        message = f"^{name} waits in a thread that runs an event loop"
        with pytest.warns(RuntimeWarning, match=message) as told:
            assert getattr(limiter, name)("search")
        assert told[0].filename == __file__
        later.join()
    server.halt()
    later = threading.Timer(0.05, server.resume)
    later.start()
    with pytest.warns(RuntimeWarning, match=r"await asyncio.to_thread\(limiter.snapshot\)") as told:
        assert limiter.snapshot()["search"].remaining == 3
    assert told[0].filename == __file__
    later.join()


# Threads


def test_other_threads_run_while_one_waits_for_an_answer(server: Server) -> None:
    limiter = Limiter({"search": hourly(5)}, store=server.url())
    assert limiter.try_acquire("search")
    server.halt()
    found: list[Decision] = []
    asks = [
        lambda: found.append(limiter.try_acquire("search")),
        lambda: found.append(limiter.acquire_sync("search")),
        lambda: found.append(limiter.limit("search")(lambda: limiter.try_acquire("free"))()),
    ]
    threads = [threading.Thread(target=ask) for ask in asks]
    for thread in threads:
        thread.start()
    # This thread does all it likes, and even a snapshot of another store.
    assert admitted(Limiter({"other": hourly(9)}), "other", 20) == 9
    assert found == []
    server.resume()
    for thread in threads:
        thread.join(PATIENCE)
    assert [bool(decision) for decision in found] == [True] * 3


def test_many_threads_share_one_limiter(redis_url: str) -> None:
    limiter = Limiter({"search": hourly(300), "all": hourly(10_000, tools="*")}, store=redis_url)
    assert hammer(lambda _number: admitted(limiter, times=150)) == 300


def test_threads_wait_for_their_turn_beside_loops(redis_url: str) -> None:
    limiter = Limiter({"search": ToolRateLimit(200, 1, max_wait=60)}, store=redis_url)

    async def several() -> int:
        return sum(map(bool, await asyncio.gather(*(limiter.acquire("search") for _ in range(9)))))

    def work(number: int) -> int:
        if number % 2:
            return asyncio.run(several())
        return sum(limiter.acquire_sync("search").admitted for _ in range(9))

    assert hammer(work) == 36


@pytest.fixture
def alarms() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has this thread, which is the main one, called by a signal."""
    before = signal.getsignal(signal.SIGUSR1)
    threads: list[threading.Thread] = []

    def call(act: Callable[[], object]) -> None:
        main = threading.get_ident()
        signal.signal(signal.SIGUSR1, lambda _signal, _frame: act())
        threads.append(threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1)))
        threads[-1].start()

    yield call
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, before)


class Stop(Exception):
    """Raised by a signal handler, as Ctrl-C does."""


def test_r17_a_signal_ends_a_wait_for_an_answer(
    server: Server, alarms: Callable[[Callable[[], object]], None]
) -> None:
    limiter = Limiter({"search": hourly(5)}, store=server.url(timeout="60s"))
    assert limiter.try_acquire("search")
    server.halt()

    def stop() -> None:
        raise Stop

    for ask in (limiter.try_acquire, limiter.acquire_sync):
        alarms(stop)
        with pytest.raises(Stop):
            ask("search")
    server.resume()
    # The answers to those come in between, and are not taken for others'.
    assert admitted(limiter, times=9) == 2
    assert limiter.try_acquire("search").reason == "rate"


def test_a_signal_handler_may_ask_while_its_thread_waits_for_an_answer(
    server: Server, alarms: Callable[[Callable[[], object]], None]
) -> None:
    limiter = Limiter({"search": hourly(9)}, store=server.url())
    assert limiter.try_acquire("search")
    server.halt()
    found: list[bool] = []

    def ask() -> None:
        server.resume()
        found.extend(bool(limiter.try_acquire("search")) for _ in range(3))

    alarms(ask)
    assert limiter.try_acquire("search")
    assert found == [True] * 3
    assert limiter.snapshot()["search"].remaining == 4


# When it fails


POLICIES = {
    "local": ([True, True, False], "rate"),
    "deny": ([False] * 3, "store"),
    "admit": ([True] * 3, None),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_r30_where_nobody_answers_each_policy_does_what_it_says(policy: Any) -> None:
    found, reason = POLICIES[policy]
    for limiter in (
        Limiter({"search": hourly(2)}, store=NOBODY, on_store_error=policy),
        Limiter({"search": hourly(2, on_store_error=policy)}, store=NOBODY),
        Limiter({"search": hourly(2, on_store_error=policy)}, store=NOBODY, on_store_error="raise"),
    ):
        decisions = [
            limiter.try_acquire("search"),
            limiter.acquire_sync("search"),
            asyncio.run(limiter.acquire("search")),
        ]
        assert [decision.admitted for decision in decisions] == found
        assert decisions[-1].reason == reason
        counts = limiter.store_counts()
        assert counts is not None
        assert (counts.answered, counts.alone, counts.is_down) == (0, 3, True)
        assert limiter.snapshot()["search"].remaining is None


def test_by_default_a_bucket_of_this_process_decides() -> None:
    limiter = Limiter({"search": hourly(2)}, store=NOBODY)
    assert admitted(limiter, times=5) == 2
    assert limiter.try_acquire("search").reason == "rate"


def test_of_several_limits_the_strictest_says_what_becomes_of_a_call() -> None:
    names = ["raise", "deny", "local", "admit"]
    for place, strictest in enumerate(names):
        rest = names[place:]
        limits = {name: hourly(2, tools="search", on_store_error=name) for name in rest}
        limiter = Limiter(limits, store=NOBODY)
        if strictest == "raise":
            with pytest.raises(StoreError, match=r"limit 'raise' of tool 'search'"):
                limiter.try_acquire("search")
        else:
            assert admitted(limiter, times=3) == POLICIES[strictest][0].count(True)


def test_r35_raise_is_an_error_wherever_a_call_is_asked_for() -> None:
    limiter = Limiter({"search": hourly(2)}, store=NOBODY, on_store_error="raise")
    message = (
        r"^the store failed, and limit 'search' of tool 'search' says to raise an error then: "
        r"the store is down: 127\.0\.0\.1:1: Connection refused"
    )
    ran: list[str] = []
    sync = limiter.limit("search")(lambda: ran.append("sync"))

    @limiter.limit("search")
    async def search() -> None:
        ran.append("async")

    for ask in (
        lambda: limiter.try_acquire("search"),
        lambda: limiter.acquire_sync("search"),
        lambda: asyncio.run(limiter.acquire("search", max_wait=5)),
        sync,
        lambda: asyncio.run(search()),
    ):
        with pytest.raises(StoreError, match=message):
            ask()
    assert ran == []
    dry = Limiter({"search": hourly(2)}, store=NOBODY, on_store_error="raise", dry_run=True)
    decision = dry.try_acquire("search")
    assert (decision.admitted, decision.reason) == (True, "store")


def test_r30_one_call_waits_for_a_server_that_says_nothing_and_the_rest_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"redis://127.0.0.1:{port}/0?prefix=test&timeout=100ms"
        limiter = Limiter({"search": hourly(2)}, store=url, on_store_error="deny")

        async def several() -> list[Decision]:
            return await asyncio.gather(*(limiter.acquire("search") for _ in range(50)))

        found = [*asyncio.run(several()), *(limiter.try_acquire("search") for _ in range(50))]
        counts = limiter.store_counts()
    assert {decision.reason for decision in found} == {"store"}
    assert any(decision.retry_after for decision in found)
    assert counts is not None
    # Those fifty asked before anybody knew.
    assert counts.failed <= 51
    assert counts.alone == 100
    [told] = [record.getMessage() for record in caplog.records]
    assert f"127.0.0.1:{port}/0 is down" in told


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_r27_when_the_server_is_back_it_decides_again(
    server: Server, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.url(timeout="100ms")
    limiter = Limiter({"search": hourly(1000)}, store=url, on_store_error="deny")
    until(lambda: limiter.try_acquire("search").admitted)
    caplog.clear()
    if how == "killed":
        server.stop()
    else:
        server.halt()
    assert limiter.try_acquire("search").reason == "store"

    async def several() -> set[str | None]:
        return {(await limiter.acquire("search")).reason for _ in range(50)}

    assert asyncio.run(several()) == {"store"}
    if how == "killed":
        server.restart()
    else:
        server.resume()
    until(lambda: limiter.try_acquire("search").admitted)
    assert limiter.try_acquire("search")
    limiter.store_counts()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) >= 2
    assert "is down" in told[0]
    assert "answers again" in told[-1]
    assert len(told) % 2 == 0


def test_r27_a_server_that_forgot_the_script_is_told_it_again(server: Server) -> None:
    limiter = Limiter({"search": hourly(9)}, store=server.url(), on_store_error="deny")
    for _ in range(3):
        assert limiter.try_acquire("search")
        server.ask("SCRIPT", "FLUSH")

    async def several() -> int:
        return sum(map(bool, await asyncio.gather(*(limiter.acquire("search") for _ in range(4)))))

    assert asyncio.run(several()) == 4
    assert limiter.snapshot()["search"].remaining == 2


def test_r29_a_bucket_that_is_none_fails_its_own_calls_and_is_told_of_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"search": hourly(5), "other": hourly(5)}
    limiter = Limiter(limits, store=server.url(), on_store_error="deny")
    assert limiter.try_acquire("search")
    [key] = [server.ask("EVAL", "return redis.call('KEYS', '*bucket*')[1]", "0")]
    server.ask("SET", key, "garbage")
    for _ in range(5):
        assert limiter.try_acquire("search").reason == "store"
    assert admitted(limiter, "other", 9) == 5
    [told] = [record.getMessage() for record in caplog.records]
    assert key in told
    server.ask("DEL", key)
    assert limiter.try_acquire("search")


def test_what_is_said_when_python_ends_is_not_lost(server: Server) -> None:
    url = server.url(timeout="100ms")
    said = run_program(PROGRAMS / "redis_log.py", url, str(server.process))
    assert said.count("is down") == 1


# Clusters


def asked_in_each_way(limiter: Limiter, times: int) -> list[Decision]:
    """So many calls at once, in a row, and from a loop, each."""

    async def several() -> list[Decision]:
        return await asyncio.gather(*(limiter.acquire("search") for _ in range(times)))

    found = [limiter.try_acquire("search") for _ in range(times)]
    found += [limiter.acquire_sync("search") for _ in range(times)]
    return found + asyncio.run(several())


def test_r29_by_any_node_of_a_cluster_the_one_with_the_slot_decides() -> None:
    with cluster() as nodes:
        limits = {"search": hourly(90)}
        limiters = [Limiter(limits, store=node.url(), on_store_error="deny") for node in nodes]
        assert sum(sum(map(bool, asked_in_each_way(each, times=15))) for each in limiters) == 90
        for limiter in limiters:
            assert limiter.snapshot()["search"].remaining == 0
            counts = limiter.store_counts()
            assert counts is not None
            assert (counts.failed, counts.alone, counts.is_down) == (0, 0, False)
        # That of "test" is 6918, at the second node.
        assert [node.ask("DBSIZE") != "0" for node in nodes] == [False, True, False]


def test_r27_a_slot_that_moved_and_a_node_that_ended_are_followed_and_waited_for() -> None:
    with cluster() as nodes:
        limits = {"search": hourly(900)}
        limiter = Limiter(limits, store=nodes[0].url(), on_store_error="deny")
        raises = Limiter(limits, store=nodes[0].url(), on_store_error="raise")
        assert all(asked_in_each_way(limiter, times=5))
        assert raises.try_acquire("search")
        third = nodes[2].ask("CLUSTER", "MYID")
        nodes[1].ask("FLUSHALL")
        for node in reversed(nodes):
            node.ask("CLUSTER", "SETSLOT", "6918", "NODE", third)
        assert limiter.try_acquire("search").reason == "store"
        with pytest.raises(StoreError, match="MOVED 6918"):
            raises.try_acquire("search")
        until(lambda: limiter.try_acquire("search").admitted)
        assert all(asked_in_each_way(limiter, times=5))

        nodes[2].stop()
        assert {decision.reason for decision in asked_in_each_way(limiter, times=5)} == {"store"}
        with pytest.raises(StoreError):
            raises.try_acquire("search")
        nodes[2].restart()
        until(lambda: limiter.try_acquire("search").admitted)
        assert all(asked_in_each_way(limiter, times=5))


# Forks


def test_r19_a_fork_beside_a_call_at_the_server_leaves_both_able_to_go_on(server: Server) -> None:
    limiter = Limiter({"search": hourly(100)}, store=server.url())
    assert limiter.try_acquire("search")
    found: list[Decision] = []
    for number in range(5):
        server.halt()
        thread = threading.Thread(target=lambda: found.append(limiter.try_acquire("search")))
        thread.start()

        def child() -> str:
            server.resume()
            took = [limiter.try_acquire("search"), asyncio.run(limiter.acquire("search"))]
            # Its own, and its parent's.
            return json.dumps([*map(bool, took), server.clients()])

        assert json.loads(forked(child, PATIENCE)) == [True, True, 2], number
        thread.join(PATIENCE)
        assert found.pop()
    assert limiter.snapshot()["search"].remaining == 100 - 1 - 5 * 3


@pytest.mark.parametrize("asks", ["acquire_sync", "snapshot"])
def test_r19_a_fork_in_the_midst_of_a_call_leaves_both_able_to_go_on(
    server: Server, asks: str
) -> None:
    limiter = Limiter({"search": hourly(9)}, store=server.url(), on_store_error="deny")
    assert limiter.try_acquire("search")
    reading, writing = os.pipe()
    children: list[int] = []

    def fork(*_: object) -> None:
        child = os.fork()
        children.append(child)
        if child:
            # It goes on, and listens first.
            until(lambda: Path(f"/proc/{child}/stat").read_text().split()[2] == "S")
            server.resume()

    before = signal.signal(signal.SIGALRM, fork)
    server.halt()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        if asks == "snapshot":
            found: Any = limiter.snapshot()["search"].remaining
        else:
            found = bool(limiter.acquire_sync("search"))
        if children == [0]:
            again = [bool(limiter.acquire_sync("search")) for _ in range(2)]
            os.write(writing, json.dumps([found, *again]).encode())
    finally:
        if children == [0]:
            os._exit(0)
        signal.signal(signal.SIGALRM, before)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = json.load(pipe)
    os.waitpid(children[0], 0)
    assert found == (8 if asks == "snapshot" else True)
    # Who asked was its parent.
    assert told == [None if asks == "snapshot" else False, True, True]


def test_r19_a_loop_in_a_child_is_its_own(redis_url: str) -> None:
    limiter = Limiter({"search": hourly(100)}, store=redis_url)

    async def several() -> int:
        return sum(map(bool, await asyncio.gather(*(limiter.acquire("search") for _ in range(5)))))

    async def parent() -> list[Any]:
        mine = await several()
        theirs = await asyncio.to_thread(
            forked, lambda: json.dumps(asyncio.run(several())), PATIENCE
        )
        return [mine, json.loads(theirs), await several()]

    assert asyncio.run(parent()) == [5, 5, 5]
    assert limiter.snapshot()["search"].remaining == 85


def test_16_processes_admit_no_more_than_the_burst_and_the_rate(server: Server) -> None:
    limits = {"search": ToolRateLimit(500, 40)}

    def process() -> int:
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                limiter = Limiter(limits, store=server.url(), on_store_error="deny")
                os.write(writing, str(admitted(limiter, times=400)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        return reading

    begin = server.time()
    told = []
    for reading in [process() for _ in range(16)]:
        with os.fdopen(reading) as pipe:
            told.append(int(pipe.read()))
    end = server.time()
    for _ in told:
        os.wait()
    assert 40 <= sum(told) <= 40 + 500 * (end - begin)


# Its end


def test_each_forked_process_tells_of_itself(server: Server) -> None:
    parent = os.getpid()

    def worker() -> int:
        child = os.fork()
        if child == 0:
            try:
                limiter = Limiter({"search": hourly(5)}, store=server.url())
                while os.getppid() == parent:
                    limiter.try_acquire("search")
                    time.sleep(0.02)
            finally:
                os._exit(1)
        return child

    children = [worker() for _ in range(3)]
    try:
        # It is the number of them that is answered first.
        until(lambda: server.ask("KEYS", "{test}:process:*") == "3")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["tasks", "threads", "loops", "line", "closed"])
def test_python_ends_at_once_and_silently_whatever_is_asked(server: Server, how: str) -> None:
    program = PROGRAMS / "redis_exit.py"
    server.halt()
    begin = time.monotonic()
    # The server would be waited for as long.
    said = run_program(program, server.url(timeout="60s"), how)
    assert said == "asked\n"
    assert time.monotonic() - begin < 50


def test_python_ends_silently_while_threads_are_being_answered(server: Server) -> None:
    for _ in range(10):
        assert run_program(PROGRAMS / "redis_exit.py", server.url(), "busy") == "asked\n"


def test_close_answers_what_was_asked_and_raises_from_then_on(server: Server) -> None:
    limiter = Limiter({"search": hourly(9, max_wait=60), "slow": hourly(1)}, store=server.url())
    assert limiter.try_acquire("search")
    assert limiter.try_acquire("slow")
    server.halt()
    found: list[Decision] = []
    thread = threading.Thread(target=lambda: found.append(limiter.try_acquire("search")))
    thread.start()

    async def work() -> None:
        waits = asyncio.ensure_future(limiter.acquire("slow", max_wait=80_000))
        asked = asyncio.ensure_future(limiter.acquire("search"))
        await ticks()
        limiter.close()
        with pytest.raises(StoreError, match=r"^the limiter is closed$"):
            await waits
        with pytest.raises(StoreError, match=r"^the limiter is closed$"):
            await limiter.acquire("search")
        server.resume()
        assert await asked

    until(thread.is_alive)
    asyncio.run(work())
    thread.join(PATIENCE)
    assert [bool(decision) for decision in found] == [True]
    for ask in (
        lambda: limiter.try_acquire("search"),
        lambda: limiter.acquire_sync("search"),
        lambda: limiter.pause("search", 1),
        limiter.snapshot,
        limiter.limit("search")(lambda: None),
    ):
        with pytest.raises(StoreError, match=r"^the limiter is closed$"):
            ask()
    limiter.close()
    until(lambda: server.clients() == 0)


async def test_a_block_closes_it(redis_url: str) -> None:
    limits = {"search": hourly(5)}
    async with Limiter(limits, store=redis_url) as limiter:
        assert await limiter.acquire("search")
    with pytest.raises(StoreError):
        await limiter.acquire("search")
    with Limiter(limits, store=redis_url) as other:
        assert await other.acquire("search")
    with pytest.raises(StoreError):
        await other.acquire("search")
    await other.aclose()


async def test_without_a_store_over_a_network_to_close_does_nothing() -> None:
    limiter = Limiter({"search": hourly(3)})
    async with limiter:
        assert limiter.try_acquire("search")
    with limiter:
        assert await limiter.acquire("search")
    limiter.close()
    assert limiter.try_acquire("search")
    assert limiter.store_counts() is None


def test_a_limiter_that_is_dropped_ends_its_connection(server: Server) -> None:
    for _ in range(20):
        limiter = Limiter({"search": hourly(100)}, store=server.url())
        assert limiter.try_acquire("search")
        assert asyncio.run(limiter.acquire("search"))
        del limiter
    until(lambda: server.clients() == 0)


def test_threads_and_loops_that_are_gone_leave_no_descriptors(redis_url: str) -> None:
    limiter = Limiter({"search": hourly(1000)}, store=redis_url)

    def use() -> None:
        assert limiter.try_acquire("search")
        assert asyncio.run(limiter.acquire("search"))

    def descriptors() -> int:
        _limiter._forget_closed()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no paths are needed

    use()
    before = descriptors()
    for _ in range(20):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    # The store's thread lets go of them when it has woken their callers.
    until(lambda: descriptors() <= before)


def test_counts_are_values(redis_url: str) -> None:
    limiter = Limiter({"search": hourly(5)}, store=redis_url)
    assert admitted(limiter, times=3) == 3
    counts = limiter.store_counts()
    assert counts is not None
    assert counts == limiter.store_counts()
    assert (counts.answered, counts.failed, counts.alone, counts.is_down) == (3, 0, 0, False)
    assert counts.seconds > 0
    said = f"StoreCounts(is_down=False, answered=3, seconds={counts.seconds!r}, failed=0, alone=0)"
    assert repr(counts) == said
    with pytest.raises(AttributeError):
        counts.answered = 5  # type: ignore[misc]


def test_the_decorator_says_that_a_limit_is_exceeded(redis_url: str) -> None:
    search = Limiter({"search": hourly(1)}, store=redis_url).limit("search")(lambda: "found")
    assert search() == "found"
    with pytest.raises(RateLimitExceeded, match=r"^Rate limit exceeded for tool 'search'"):
        search()
