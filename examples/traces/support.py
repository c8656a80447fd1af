"""Writes support.csv: ten minutes of support agents that look customers up in a CRM.

A run of an agent makes one to three turns, and in each turn the model asks for some calls at once.
The numbers only look random: the trace is the same each time.

    python examples/traces/support.py > examples/traces/support.csv
"""

from __future__ import annotations

import math
import random

START = 1_764_489_600  # 2025-11-30 08:00:00 UTC
LENGTH = 600.0
RUNS_PER_SECOND = 0.15
TENANTS = ("acme", "globex", "initech")


def main() -> None:
    noise = random.Random(2025)  # noqa: S311 (the same each time)
    calls: list[tuple[float, float, str, str]] = []
    now = 0.0
    while now < LENGTH:
        # The sixth minute is a busy one.
        rush = 3.0 if 300.0 <= now < 360.0 else 1.0
        now -= _log(noise) / (RUNS_PER_SECOND * rush)
        tenant = TENANTS[int(noise.random() ** 2 * len(TENANTS))]
        turn = now
        for _ in range(1 + int(noise.random() * 3)):
            for _ in range(1 + int(noise.random() ** 2 * 8)):
                tool = "crm_update" if noise.random() < 0.2 else "crm_search"
                duration = 0.1 + noise.random() * 0.4
                calls.append((turn + noise.random() * 0.01, duration, tool, tenant))
            turn += 2.0 + noise.random() * 6.0
    # A line is written when its call has ended.
    calls.sort(key=lambda call: call[0] + call[1])
    print("time,tool,tenant,duration")
    for at, duration, tool, tenant in calls:
        print(f"{START + int(at)}.{int(at % 1 * 1000):03},{tool},{tenant},{duration:.3f}")


def _log(noise: random.Random) -> float:
    """The logarithm of a number from 0 to 1, to a few digits: the same on every machine."""
    return round(math.log(1.0 - noise.random()), 6)


if __name__ == "__main__":
    main()
