"""The command `callgate` as the package installs it, and the schema that it prints."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from .running import LONGEST

ROOT = Path(__file__).parents[2]
CASES = ROOT / "crates" / "callgate-cli" / "tests"
"""Files of limits, each with what the command prints about it: the binary's tests read them too."""

SCRIPT = [str(Path(sys.executable).parent / "callgate")]
MODULE = [sys.executable, "-W", "error", "-m", "callgate"]


def run(command: list[str], *arguments: str | bytes) -> tuple[int, str, str]:
    """Runs the command where its cases are; the exit code, what it printed, and its errors."""
    done = subprocess.run(
        [*command, *arguments],
        cwd=CASES.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LONGEST,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# --- the script ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_the_package_installs_the_very_command(command: list[str]) -> None:
    good, bad = (CASES / name for name in ("good/typical.txt", "bad/rates.txt"))
    assert run(command, "check", "tests/good/typical.toml") == (0, good.read_text(), "")
    assert run(command, "check", "tests/bad/rates.toml") == (1, "", bad.read_text())
    assert run(command, "schema") == (0, SCHEMA.read_text(), "")
    code, printed, errors = run(command, "chek")
    assert (code, printed) == (2, "")
    assert errors.endswith("Usage: callgate <COMMAND>\n\nFor more information, try '--help'.\n")


def test_what_python_has_kept_is_printed_first() -> None:
    program = (
        "import sys; print('first'); sys.argv[1:] = ['--version'];"
        "from callgate.__main__ import main; sys.exit(main())"
    )
    code, printed, errors = run([sys.executable, "-c", program])
    assert (code, errors) == (0, "")
    assert printed.startswith("first\ncallgate ")


def test_a_closed_pipe_is_no_fault() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as pipe:
        done = subprocess.run(
            [*SCRIPT, "schema"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=LONGEST,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    os.mkfifo(file)
    with (
        subprocess.Popen([*SCRIPT, "check", str(file)], stderr=subprocess.PIPE) as command,
        file.open("wb"),  # It opens once the command reads.
    ):
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=LONGEST)
    assert (command.returncode, errors) == (-signal.SIGINT, b"")


def test_ctrl_c_ends_a_simulation(tmp_path: Path) -> None:
    limits, calls = tmp_path / "limits.toml", tmp_path / "calls.csv"
    limits.write_text('[limits.crm]\nrate = "1/s"\nburst = 1\n')
    os.mkfifo(calls)
    with (
        subprocess.Popen(
            [*SCRIPT, "simulate", str(limits), str(calls)], stderr=subprocess.PIPE
        ) as command,
        calls.open("wb"),  # It opens once the command reads, which then waits for calls.
    ):
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=LONGEST)
    assert (command.returncode, errors) == (-signal.SIGINT, b"")


def test_ctrl_c_takes_the_progress_bar_away(tmp_path: Path) -> None:
    limits, calls = tmp_path / "limits.toml", tmp_path / "calls.csv"
    limits.write_text('[limits.crm]\nrate = "1/s"\nburst = 1\n')
    # Long enough for a bar; to fit limits it is read again and again.
    calls.write_bytes(b"time,tool\n" + b"1764489600.25,crm\n" * 2_000_000)
    person, terminal = pty.openpty()
    arguments = ["simulate", "--fit", str(limits), str(calls)]
    with (
        os.fdopen(person, "rb", buffering=0) as screen,
        subprocess.Popen([*SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=terminal) as command,
    ):
        os.close(terminal)
        shown = b""
        while b"left" not in shown:
            shown += screen.read(4096)
        command.send_signal(signal.SIGINT)
        with suppress(OSError):  # It is how a terminal tells that nobody writes to it any more.
            while last := screen.read(4096):
                shown += last
        printed, _ = command.communicate(timeout=LONGEST)
    assert (command.returncode, printed) == (-signal.SIGINT, b"")
    assert b"pass 1" in shown
    assert shown.endswith(b"\r\x1b[2K"), "the line is empty"


def test_a_name_that_is_no_text_is_no_traceback() -> None:
    code, printed, errors = run(SCRIPT, "check", b"caf\xe9.toml")
    assert (code, printed) == (1, "")
    assert errors.endswith("--> caf\N{REPLACEMENT CHARACTER}.toml\n")


# --- the schema ----------------------------------------------------------------------------------

SCHEMA = ROOT / "docs" / "callgate.schema.json"

WHAT_NO_SCHEMA_SAYS = {
    # JSON has no such number.
    ("rates", "nan"),
    # A schema's whole number may be written with a point.
    ("bursts", "point"),
    ("concurrency", "point"),
    # Ranges that depend on a unit, or on another key.
    ("rates", "fast"),
    ("rates", "slow"),
    ("bursts", "dear"),
    ("quotas", "burst"),
    ("quotas", "huge"),
    ("quotas", "dear"),
    ("waits", "long"),
    ("waits", "fine"),
}

OF_THE_STORE = {"store_burst", "store_policy"}
"""Files with what their kind of store alone does not take."""


def validator() -> Any:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def parsed(text: str) -> dict[str, Any] | None:
    """What a TOML text says; None where it is none."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    return document


@pytest.mark.parametrize("file", sorted(CASES.glob("good/*.toml")), ids=lambda file: file.stem)
def test_the_schema_takes_what_the_command_takes(file: Path) -> None:
    document = parsed(file.read_text())
    assert [error.message for error in validator().iter_errors(document)] == []


@pytest.mark.parametrize("file", sorted(CASES.glob("bad/*.toml")), ids=lambda file: file.stem)
def test_the_schema_refuses_each_bad_limit_of_which_it_can_tell(file: Path) -> None:
    document = parsed(file.read_text())
    if document is None:
        return  # Not even TOML.
    assert validator().is_valid(document) == (file.stem in OF_THE_STORE)
    if file.stem in OF_THE_STORE:
        return
    limits = document.get("limits")
    errors = file.with_suffix(".txt").read_text()
    for name, limit in limits.items() if isinstance(limits, dict) else ():
        if f"limit '{name}'" in errors:
            taken = validator().is_valid({"limits": {name: limit}})
            assert taken == ((file.stem, name) in WHAT_NO_SCHEMA_SAYS), name
