"""Measures callgate from Python beside other limiters: `make bench`, or python benches/python/bench.py.

Needs the peers (python/requirements/bench.in) and the module in benches/python/floor. Prints tables
in GitHub's Markdown. Nothing fails when a target is missed: on a busy machine it may be.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import grants
import redis_store
from agent_framework import FunctionMiddleware
from grants import Wait
from hammer import BURST, IN_A_ROW, RATE, SECONDS, TASKS, THREADS, Tally, hammer_apart
from middleware import LockMiddleware, Silent, Trivial, execution
from neighbour import neighbour
from peers import PEERS, Peer
from timing import (
    Batch,
    awaiting,
    awaiting_each,
    calling,
    calling_as,
    looping,
    looping_as,
    measure,
    median,
    minus,
    plus,
    ratio,
    repeating,
)

from callgate import Limiter, ToolRateLimit
from callgate.agent_framework import ToolRateLimitMiddleware

TOOLS = [f"tool_number_{number}" for number in range(16)]
CALLS = TOOLS * 64
TENANTS = [f"tenant-{number * 389 % 1_000:06}" for number in range(len(CALLS))]

# Never empty while this runs; never refilled.
OPEN = (1_000_000_000, 1_000_000_000)
SHUT = (1 / 3600, 1)

HAMMERINGS = 3
WAITINGS = 3

OURS = "`ToolRateLimitMiddleware`"


async def main() -> None:
    """Prints all tables."""
    print(
        f"CPython {platform.python_version()}, {os.cpu_count()} cores, "
        f"agent-framework-core {version('agent-framework-core')}. Ratios are medians over rounds "
        "in which all take turns; the machine's own speed is in the absolute figures."
    )
    await print_calls()
    await print_acquire()
    if sys.platform == "linux":
        with TemporaryDirectory(dir="/dev/shm") as folder:
            await print_store(f"shm:{folder}/calls")
            await print_neighbours(f"shm:{folder}/neighbours")
    with redis_store.serving() as url:
        await print_redis(url)
    await print_middleware()
    await print_peers()
    print_waiting()


async def print_calls() -> None:
    """`Limiter.try_acquire` beside the least that a method like it could do."""
    floor: Any = importlib.import_module("callgate_bench_floor").Floor()
    titles = {
        "clock": "`time.monotonic()`",
        "floor": "the floor: reads the clock, returns a fresh object of as many fields",
        "admitted": "`limiter.try_acquire(name)`, admitted",
        "rejected": "`limiter.try_acquire(name)`, rejected",
        "both": "the same under two limits, admitted",
        "neither": "the same under two limits, rejected",
        "tenant": "`limiter.try_acquire(name, tenant=tenant)` with a bucket for each of 1,000, admitted",
    }
    one = {
        "clock": repeating(time.monotonic, len(CALLS)),
        "floor": calling(floor.try_acquire, CALLS),
        "admitted": calling(limiter(OPEN).try_acquire, CALLS),
        "rejected": calling(drained().try_acquire, CALLS),
        "both": calling(limiter(OPEN, in_all=OPEN).try_acquire, CALLS),
        "neither": calling(drained(in_all=OPEN).try_acquire, CALLS),
    }
    tenant = calling_as(limiter(OPEN, per=["tenant"]).try_acquire, CALLS, TENANTS)
    loops = {"loop": looping(CALLS), "loop_as": looping_as(CALLS, TENANTS)}
    samples = await measure({**loops, **one, "tenant": tenant}, rounds=1_000)
    net = {name: minus(samples[name], samples["loop"]) for name in one}
    net["tenant"] = minus(samples["tenant"], samples["loop_as"])
    part = {name: ratio(net[name], net["floor"]) for name in titles}
    most = {"admitted": 1.5, "rejected": 1.5}
    rows = [
        [title, f"{median(net[name]):.0f}", f"{part[name]:.2f}", target(part[name], most.get(name))]
        for name, title in titles.items()
    ]
    print_table(
        f"One call by name among {len(TOOLS)} tools", ["", "CPU ns", "ratio", "target"], rows
    )


async def print_acquire() -> None:
    """`Limiter.acquire` of who need not wait, beside `try_acquire` and an await of it."""
    may_wait = limiter(OPEN, max_wait=60)

    async def tried(tool: str, *, cost: Any = ..., max_wait: Any = None, **fields: Any) -> Any:
        return may_wait.try_acquire(tool)

    samples = await measure(
        {
            "loop": looping(CALLS),
            "await": awaiting_each(empty, CALLS),
            "try": calling(may_wait.try_acquire, CALLS),
            "tried": awaiting_each(tried, CALLS),
            "acquire": awaiting_each(may_wait.acquire, CALLS),
        },
        rounds=1_000,
    )
    net = {name: minus(samples[name], samples["loop"]) for name in samples if name != "loop"}
    net["both"] = plus(net["try"], net["await"])
    titles = {
        "await": "`await` of an empty coroutine",
        "try": "`limiter.try_acquire(name)`",
        "both": "the two together",
        "tried": "`await` of a coroutine with the arguments of `acquire` that calls `try_acquire`",
        "acquire": "`await limiter.acquire(name)`",
    }
    part = {name: ratio(net[name], net["tried"]) for name in titles}
    most = {"acquire": 1.2}
    rows = [
        [title, f"{median(net[name]):.0f}", f"{part[name]:.2f}", target(part[name], most.get(name))]
        for name, title in titles.items()
    ]
    print_table(
        "One call under a limit with `max_wait`, admitted at once",
        ["", "CPU ns", "ratio", "target"],
        rows,
    )


async def empty(_name: str) -> None:
    """Does nothing."""


async def print_store(store: str) -> None:
    """`Limiter.try_acquire` on a store in shared memory beside this process's own memory."""
    titles = {
        "admitted": "admitted",
        "rejected": "rejected",
        "both": "under two limits, admitted",
        "neither": "under two limits, rejected",
        "tenant": "with a bucket for each of 1,000 tenants, admitted",
    }

    def calls_of(store: str | None) -> dict[str, Batch]:
        def of(kind: str) -> str | None:
            return store and f"{store}-{kind}"

        return {
            "admitted": calling(limiter(OPEN, store=of("open")).try_acquire, CALLS),
            "rejected": calling(drained(store=of("shut")).try_acquire, CALLS),
            "both": calling(limiter(OPEN, in_all=OPEN, store=of("both")).try_acquire, CALLS),
            "neither": calling(drained(in_all=OPEN, store=of("neither")).try_acquire, CALLS),
            "tenant": calling_as(
                limiter(OPEN, per=["tenant"], store=of("tenants")).try_acquire, CALLS, TENANTS
            ),
        }

    own = {f"own {name}": batch for name, batch in calls_of(None).items()}
    shared = {f"shared {name}": batch for name, batch in calls_of(store).items()}
    loops = {"loop": looping(CALLS), "loop_as": looping_as(CALLS, TENANTS)}
    samples = await measure({**loops, **own, **shared}, rounds=500)
    most = {"admitted": 1.35, "rejected": 1.35}
    rows: list[list[str]] = []
    for name, title in titles.items():
        loop = samples["loop_as" if name == "tenant" else "loop"]
        memory, shm = (minus(samples[f"{kind} {name}"], loop) for kind in ("own", "shared"))
        part = ratio(shm, memory)
        figures = [f"{median(memory):.0f}", f"{median(shm):.0f}", f"{part:.2f}"]
        rows.append([title, *figures, target(part, most.get(name))])
    print_table(
        f"One call by name among {len(TOOLS)} tools, on a store in shared memory",
        ["", "memory, CPU ns", "store, CPU ns", "ratio", "target"],
        rows,
    )


async def print_neighbours(store: str) -> None:
    """The same while a second process draws from the same file."""
    mine, other, same = ([TOOLS[0]] * 1_000, TOOLS[1], TOOLS[0])
    cases = {
        "different keys, both admitted": (limiter_of, other),
        "one key, both rejected": (drained_of, same),
        "one key, both admitted": (limiter_of, same),
    }
    rows: list[list[str]] = []
    for title, (make, tool) in cases.items():
        url = f"{store}-{len(rows)}"
        alone = calling(make(url).try_acquire, mine)
        with neighbour(make, url, tool) as beside:
            batches = {"loop": looping(mine), "alone": alone, "beside": beside(alone)}
            samples = await measure(batches, rounds=300)
        one, two = (minus(samples[name], samples["loop"]) for name in ("alone", "beside"))
        rows.append([title, f"{median(one):.0f}", f"{median(two):.0f}", f"{ratio(two, one):.2f}"])
    print_table(
        "Two processes on one store",
        ["", "alone, CPU ns", "beside the other, CPU ns", "ratio"],
        rows,
    )


def limiter_of(store: str) -> Limiter:
    """A limiter of a store that admits all."""
    return limiter(OPEN, store=store)


def drained_of(store: str) -> Limiter:
    """A limiter of a store that rejects every tool."""
    return drained(store=store)


async def print_redis(url: str | None) -> None:
    """What tasks that ask one server get decided, beside other clients of it."""
    if url is None:
        print("\nNo redis-server on the PATH: its tables are left out.")
        return
    taken = await redis_store.measure(url)
    for callers, rounds in taken.items():
        wall = {name: redis_store.walls(each) for name, each in rounds.items()}
        cpu = {name: redis_store.cpus(each) for name, each in rounds.items()}
        ours = wall[redis_store.OURS]
        rows = [
            [
                asker.name,
                f"{1e9 / median(wall[asker.name]):,.0f}",
                micro(cpu[asker.name]),
                f"{ratio(wall[asker.name], ours):.2f}",
            ]
            for asker in redis_store.ASKERS
        ]
        print_table(
            f"A quota in Redis: tasks of one event loop: {callers}",
            ["", "decisions a second", "CPU µs", "time, x callgate"],
            rows,
        )
        three = ratio(wall[redis_store.THREE], ours)
        print(f"\nThree limits {three:.2f} x one: {target(three, 1.8)}.")
        for name, least in redis_store.LEAST.get(callers, {}).items():
            figure = ratio(wall[name], ours)
            print(f"{name} {figure:.2f} x callgate: {target_at_least(figure, least)}.")
    print()
    for asker in redis_store.ASKERS:
        print(f"- {asker.name}: {asker.how}, {asker.package} {version(asker.package)}.")


async def print_middleware() -> None:
    """What a limit adds to function middleware that does nothing."""
    await print_added(
        "What middleware adds to a tool call: admitted",
        ("only awaits `call_next()`", Trivial()),
        {
            "a bucket under `asyncio.Lock`": LockMiddleware(dict.fromkeys(TOOLS, OPEN)),
            OURS: ToolRateLimitMiddleware(limiter(OPEN)),
            f"{OURS}, a bucket for each tenant": ToolRateLimitMiddleware(
                limiter(OPEN, per=["tenant"])
            ),
        },
        most=0.25,
    )
    shut = dict.fromkeys(TOOLS, SHUT)
    await print_added(
        "What middleware adds to a tool call: rejected",
        ("only returns, and says nothing to the model", Silent()),
        {
            "a bucket under `asyncio.Lock`, answers with a text": LockMiddleware(shut),
            "the same, answers as callgate does": LockMiddleware(shut, structured=True),
            f"{OURS} (and its span)": ToolRateLimitMiddleware(drained()),
        },
    )


async def print_added(
    title: str,
    trivial: tuple[str, FunctionMiddleware],
    compared: Mapping[str, FunctionMiddleware],
    most: float | None = None,
) -> None:
    """One table: each middleware less the trivial one, beside the first of them."""
    does, nothing = trivial
    samples = await measure(
        {
            name: awaiting(execution(middleware, TOOLS[0]), 200)
            for name, middleware in {"": nothing, **compared}.items()
        },
        rounds=1_500,
    )
    added = {name: minus(samples[name], samples[""]) for name in compared}
    first, *_ = compared
    part = {name: ratio(added[name], added[first]) for name in compared}
    rows = [
        [
            name,
            micro(added[name]),
            f"{part[name]:.2f}",
            target(part[name], most) if name == OURS else "",
        ]
        for name in compared
    ]
    print_table(title, ["", "CPU µs", "ratio", "target"], rows)
    print(
        f"\nEach less the framework's pipeline with middleware that {does}, "
        f"which takes {micro(samples[''])} µs."
    )


async def print_peers() -> None:
    """Each limiter's speed, and whether it still is right under several threads."""
    batches = {peer.name: acquiring(peer) for peer in PEERS}
    samples = await measure(batches, rounds=300)
    runs = {peer.name: [hammer_apart(peer) for _ in range(HAMMERINGS)] for peer in PEERS}
    print_table(
        "One acquire, admitted; and the same limiter under four threads",
        ["limiter", "CPU µs", "x callgate", "admitted", "most due", "raised", "hung"],
        [
            [
                peer.title,
                micro(samples[peer.name]),
                f"{ratio(samples[peer.name], samples[PEERS[0].name]):.1f}",
                *exactness(peer, runs[peer.name]),
            ]
            for peer in PEERS
        ],
    )
    print(
        f"\nOn the right: {THREADS} threads with a loop each and {TASKS} tasks a loop, {IN_A_ROW} "
        f"calls in a row, {SECONDS:g} s at {RATE:,} a second with burst {BURST}, {HAMMERINGS} runs. "
        "Admitted, and the most that was due by then: in the run with the most too many. Raised: "
        "of all calls. Hung: runs in which a loop never came to its end. **Bold**: wrong.\n"
    )
    for peer in PEERS:
        errors = sorted({run.error for run in runs[peer.name] if run.error})
        raised = f" Raised: {'; '.join(errors)}." if errors else ""
        print(f"- {peer.title}: {peer.how}.{raised}")


def acquiring(peer: Peer) -> Batch:
    """Acquires that are all admitted."""
    acquire = peer.make(*OPEN)
    return awaiting(acquire, 100) if peer.awaits else repeating(acquire, 100)


def exactness(peer: Peer, runs: Sequence[Tally]) -> list[str]:
    """The right half of a limiter's row."""
    counted = [(run, peer.most(RATE, BURST, run.end - run.begin)) for run in runs if run.calls]
    raised = sum(run.errors for run in runs) / max(1, sum(run.calls for run in runs))
    hung = sum(run.hung > 0 for run in runs)
    worst = max(counted, key=lambda pair: pair[0].admitted - pair[1], default=None)
    admitted, most = (worst[0].admitted, worst[1]) if worst else (0, 0)
    return [
        wrong_if(admitted > most, f"{admitted:,}"),
        f"{most:,}",
        wrong_if(raised > 0, f"{raised:.0%}" if raised == 0 or raised >= 0.01 else "< 1%"),
        wrong_if(hung > 0, f"{hung} of {len(runs)}"),
    ]


def print_waiting() -> None:
    """What a grant costs, and who gets it, when few and when many wait."""
    peers = (grants.NO_WAIT, *grants.LIMITERS)
    waits: dict[str, list[list[Wait]]] = {peer.name: [[] for _ in grants.WAITERS] for peer in peers}
    for _ in range(WAITINGS):
        for peer in peers:
            for number, rounds in zip(grants.WAITERS, waits[peer.name], strict=True):
                rounds.append(grants.wait_apart(peer, number))
    none = [cpu(rounds) for rounds in waits[grants.NO_WAIT.name]]
    print_table(
        "Tasks that wait for a token of one bucket: CPU µs a grant",
        [
            "limiter",
            *(f"{number:,} wait" for number in grants.WAITERS),
            f"{grants.WAITERS[-1]:,} : {grants.WAITERS[0]:,}",
            *("in order", "early, ms", "late, ms"),
        ],
        [
            [peer.title, *costs(waits[peer.name], none), *turns(waits[peer.name])]
            for peer in grants.LIMITERS
        ],
    )
    print(
        f"\nAll ask at once for a token of a drained bucket, {grants.RATE:,} a second with burst "
        f"{grants.BURST}. CPU of the process, less that of as many tasks that wait for nothing "
        f"({grants.NO_WAIT.name}: {', '.join(map(micro, none))} µs). In order: of arrival. Early, "
        "late: the most that a grant came before or after its token was due; late includes the "
        "time to start all tasks. >: given up before all were served. **Bold**: wrong.\n"
    )
    for peer in grants.LIMITERS:
        print(f"- {peer.title}: {peer.how}.")


def cpu(rounds: Sequence[Wait]) -> list[float]:
    """The CPU nanoseconds of a grant in each round."""
    return [wait.cpu for wait in rounds]


def costs(waits: Sequence[Sequence[Wait]], none: Sequence[Sequence[float]]) -> list[str]:
    """The left half of a waiting limiter's row."""
    net = [minus(cpu(rounds), idle) for rounds, idle in zip(waits, none, strict=True)]
    figures = [*(micro(each) for each in net), f"{ratio(net[-1], net[0]):.2f}"]
    served = [all(wait.served for wait in rounds) for rounds in (*waits, waits[-1])]
    return [text if all_of else f"> {text}" for text, all_of in zip(figures, served, strict=True)]


def turns(waits: Sequence[Sequence[Wait]]) -> list[str]:
    """The right half of a waiting limiter's row."""
    every = [wait for rounds in waits for wait in rounds]
    in_order = all(wait.in_order for wait in every)
    early = max(wait.early for wait in every) * 1_000
    late = max(wait.late for wait in every) * 1_000
    return [
        wrong_if(not in_order, "yes" if in_order else "no"),
        wrong_if(early >= 0.1, f"{early:.1f}"),
        f"{late:.0f}",
    ]


def limiter(
    limit: tuple[float, int],
    *,
    in_all: tuple[float, int] | None = None,
    per: Sequence[str] = (),
    max_wait: float = 0.0,
    store: str | None = None,
) -> Limiter:
    """A limiter of all tools: each alone, and `in_all` where that is given."""
    rate, burst = limit
    limits = {tool: ToolRateLimit(rate, burst=burst, per=per, max_wait=max_wait) for tool in TOOLS}
    if in_all is not None:
        rate, burst = in_all
        limits["in all"] = ToolRateLimit(rate, burst=burst, tools=TOOLS)
    return Limiter(limits, store=store)


def drained(*, in_all: tuple[float, int] | None = None, store: str | None = None) -> Limiter:
    """A limiter that rejects every tool."""
    shut = limiter(SHUT, in_all=in_all, store=store)
    for tool in TOOLS:
        shut.try_acquire(tool)
    return shut


def target(figure: float, most: float | None) -> str:
    """Whether a figure is what it should be."""
    if most is None:
        return ""
    return f"<= {most:g}: {'ok' if figure <= most else 'MISSED'}"


def target_at_least(figure: float, least: float) -> str:
    """The same where more is better."""
    return f">= {least:g}: {'ok' if figure >= least else 'MISSED'}"


def wrong_if(wrong: bool, text: str) -> str:
    """Bold where it is wrong."""
    return f"**{text}**" if wrong else text


def micro(samples: Sequence[float]) -> str:
    """The median, in microseconds."""
    return f"{median(samples) / 1_000:.2f}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table under its title; all columns but the first to the right."""
    print(f"\n**{title}**\n")
    rule = ["---", *("---:" for _ in header[1:])]
    for row in (header, rule, *rows):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
