"""Traces, whatever ends the process that writes them: `test_trace.py` in `agent_framework` has what is written."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from callgate import ConfigError, Trace

from .running import LONGEST, run_program
from .traced import trace_call, written

PROGRAMS = Path(__file__).parent / "programs"
MANY = 1 << 26


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


def start(path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Starts a program that traces calls."""
    program = [sys.executable, str(PROGRAMS / "trace_calls.py"), str(path), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)


def test_what_is_left_is_written_when_python_ends(path: Path) -> None:
    run_program(PROGRAMS / "trace_calls.py", str(path), str(MANY), "300")
    assert [line["tool"] for line in written(path)] == ["search"] * 300


def test_what_is_left_is_written_when_a_trace_is_dropped(path: Path) -> None:
    trace = Trace(path)
    trace_call(trace)
    del trace
    assert len(list(written(path))) == 1


def test_a_killed_process_leaves_whole_lines(path: Path) -> None:
    process = start(path, MANY)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    # Takes away the one that was torn, if it was.
    trace_call(Trace(path))
    lines = list(written(path))
    assert len(lines) > 1000
    assert [line["duration"] >= 0 for line in lines] == [True] * len(lines)


def test_processes_that_write_one_file_lose_nothing_when_it_is_rotated(path: Path) -> None:
    processes = [start(path, 20_000, 3_000) for _ in range(3)]
    assert [process.wait(LONGEST) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    assert len(list(written(path))) == 9_000
    assert path.with_name("calls.jsonl.9").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_goes_on_with_a_thread_of_its_own(path: Path) -> None:
    said = json.loads(run_program(PROGRAMS / "trace_fork.py", str(path), warnings="ignore"))
    assert said == {"children": [[True, 0, [True, 0]]] * 10, "parent": [True, 0]}
    tools = [line["tool"] for line in written(path)]
    assert (tools.count("child"), tools.count("grandchild"), tools.count("last")) == (10, 10, 1)
    assert tools[-1] == "last"


def test_on_a_full_disk_lines_stay_whole_and_calls_go_on(path: Path) -> None:
    said = json.loads(run_program(PROGRAMS / "trace_full.py", str(path)))
    lines = list(written(path))
    assert lines[-1]["tool"] == "last"
    assert len(lines) == 201 - said["dropped"][0]
    assert said["dropped"][0] == said["dropped"][1] > 100
    # A shorter line may still fit after a longer one did not.
    *_, stopped, went_on = said["said"]
    assert len(said["said"]) < 20
    assert f"the trace '{path}' cannot be written" in stopped
    assert "File too large" in stopped
    assert f"the trace '{path}' is written again: {said['dropped'][0]} calls" in went_on


def test_calls_do_not_wait_for_a_file_that_takes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(path)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(20_000):
            trace_call(trace)
        assert trace.dropped > 9_000
    assert trace.flush()
    assert len(list(written(path))) == 20_000 - trace.dropped
    [message] = caplog.messages
    assert message.endswith("is written too slowly: some calls get no line there (1 so far)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "path must be a file's path: a str or a pathlib.Path, got 3"),
        ({"plain_fields": 1}, "plain_fields must be True or False, got 1"),
        ({"rotate_at": 1.5}, "rotate_at must be a whole number of bytes, 4,096 or more, got 1.5"),
        ({"rotate_at": 4_095}, "rotate_at must be 4,096 bytes or more, got 4,095"),
        ({"keep": 0}, "keep must be a whole number of files from 1 to 1,000, got 0"),
        ({"keep": 1_001}, "keep must be a number of files from 1 to 1,000, got 1,001"),
        ({"keep": 2**70}, f"keep must be a whole number of files from 1 to 1,000, got {2**70}"),
    ],
)
def test_bad_values_are_refused(path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Trace(**{"path": path, **arguments})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert str(refused.value) == message


def test_a_file_that_cannot_be_written_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Trace(path / "in" / "a file")
    start = f"trace must be a file to which lines can be added, got '{path}/in/a file': "
    assert str(refused.value).startswith(start)


def test_a_trace_says_its_file(path: Path) -> None:
    trace = Trace(str(path), plain_fields=True, rotate_at=4096, keep=1)
    assert trace.path == path
    assert repr(trace) == f"Trace({str(path)!r})"
    # Nothing was traced, and there is nothing to write.
    assert trace.flush()
    assert path.read_text() == ""
