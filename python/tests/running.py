"""Runs programs of their own, for what a test process can do once only or had better not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LONGEST = 60
"""Seconds after which a program counts as hung."""

EXAMPLES = Path(__file__).parents[2] / "examples" / "agent_framework"


def run_program(program: Path, *arguments: str, warnings: str = "error") -> str:
    """Runs a Python program with the packages of this interpreter and the examples' modules.

    Args:
        program: Its file.
        arguments: Its arguments.
        warnings: What becomes of its warnings.

    Returns:
        What it printed. It must end well and have no word on standard error.
    """
    path = os.pathsep.join([*filter(None, sys.path), str(EXAMPLES)])
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(program), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not done.stderr, done.stderr
    return done.stdout
