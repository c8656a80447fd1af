"""The examples run, offline, and show what they say they show."""

from __future__ import annotations

import re
import sys

import pytest

from tests.running import EXAMPLES, run_program


def test_the_demo_shows_rejections_by_call_id_and_then_replenishment() -> None:
    said = run_program(EXAMPLES / "demo.py")
    first, then, second = re.split(r"\n(?=A second later|The model asks again)", said)
    for turn, part in (("first", first), ("second", second)):
        shown = re.findall(rf"^ +{turn}-(\d) +(admitted|rejected) ", part, re.MULTILINE)
        assert shown == [
            ("1", "admitted"),
            ("2", "admitted"),
            ("3", "rejected"),
            ("4", "admitted"),
            ("5", "rejected"),
        ]
        waits = re.findall(r"rejected +(\w+): retry after (\d+\.\d+) s$", part, re.MULTILINE)
        assert [tool for tool, _ in waits] == ["lookup_customer", "get_payment_status"]
        assert 0 < float(waits[0][1]) <= 0.5
        assert 0 < float(waits[1][1]) <= 1
    assert "lookup_customer: 2 of 2 tokens" in then
    assert "get_payment_status: 1 of 1 tokens" in then


def test_two_agents_in_the_other_example_share_one_quota() -> None:
    said = run_program(EXAMPLES / "shared_limiter.py").splitlines()
    assert [line.split()[0] for line in said] == ["sales-1", "sales-2", "support-1", "support-2"]
    assert sum("active since" in line for line in said) == 2
    assert sum("Rate limit exceeded for tool 'lookup_customer'" in line for line in said) == 2


def test_tenants_of_one_agent_have_a_quota_each_and_a_reload_gives_nobody_anything() -> None:
    said = run_program(EXAMPLES / "tenants.py").splitlines()
    shown = [
        (line.split()[0], re.findall(r"limit: (\w+)", line)) for line in said if line[0] == " "
    ]
    assert shown == [
        *(("acme", []), ("acme", []), ("acme", ["lookup_customer"])),
        *(("umbrella", []), ("umbrella", []), ("umbrella", ["lookup_customer"])),
        *[("acme", ["lookup_customer"])] * 3,
        *(("initech", []), ("initech", ["crm"]), ("initech", ["crm"])),
    ]


def test_calls_that_wait_all_succeed_where_a_service_refuses_half_of_them_without() -> None:
    said = run_program(EXAMPLES / "waiting.py")
    without, waiting = (part.splitlines()[1:] for part in said.split("\n\n"))
    assert [line.split(" s  ")[1] for line in without[:-1]] == [
        *["200 OK"] * 4,
        *["429 Too Many Requests"] * 4,
    ]
    assert without[-1] == "  4 of 8 calls succeeded, the service refused 4."
    assert [line.split(" s  ")[1] for line in waiting[:-1]] == ["200 OK"] * 8
    assert waiting[-1] == "  8 of 8 calls succeeded, the service refused 0."


shared = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")


def shown(said: str) -> list[tuple[list[int], int]]:
    """What each part of an example says its processes were admitted, and all together."""
    lines = re.findall(r"^  ([\d +]+) = (\d+) ", said, re.MULTILINE)
    return [([int(count) for count in each.split(" + ")], int(total)) for each, total in lines]


@shared
def test_four_processes_keep_to_one_quota_with_a_store_and_exceed_it_without() -> None:
    without, shared = shown(run_program(EXAMPLES.parent / "shared_memory" / "processes.py"))
    assert without == ([10] * 4, 40)
    assert sum(shared[0]) == shared[1] == 20


@shared
def test_four_workers_of_a_server_keep_to_one_quota_with_a_store_and_exceed_it_without() -> None:
    # uvicorn leaves a socket to the garbage collector.
    said = run_program(EXAMPLES / "workers.py", warnings="ignore")
    without, shared = shown(said)
    assert without == ([5] * 4, 20)
    assert sum(shared[0]) == shared[1] == 5
    reads = "Then the model reads: Rate limit exceeded for tool 'search'. Retry in "
    assert said.count(reads) == 2


def test_processes_keep_to_one_quota_in_redis_and_do_as_they_are_told_while_it_is_down() -> None:
    shared, local, deny = shown(run_program(EXAMPLES.parent / "redis" / "outage.py"))
    assert sum(shared[0]) == shared[1] == 20
    assert local == ([10] * 4, 40)
    assert deny == ([0] * 4, 0)
