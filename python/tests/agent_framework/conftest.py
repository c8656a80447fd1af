"""Finds the offline chat client of the examples."""

from __future__ import annotations

import sys

from tests.running import EXAMPLES

sys.path.append(str(EXAMPLES))
