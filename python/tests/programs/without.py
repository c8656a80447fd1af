"""Uses callgate where the packages that are named cannot be imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Missing(MetaPathFinder):
    """Finds what is missing before anything else does, and says so."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def main() -> None:
    """Runs it."""
    callgate = import_module("callgate")
    limiter = callgate.Limiter({"search": callgate.ToolRateLimit(1, burst=1)}, clock=lambda: 0.0)
    said = [bool(limiter.try_acquire("search")) for _ in range(2)]
    try:
        callgate.ToolRateLimit(0, burst=1)
    except callgate.ConfigError:
        said.append(True)
    needs = None
    try:
        import_module("callgate.agent_framework")
    except ModuleNotFoundError as error:
        needs = [error.name, str(error)]
    json.dump({"alone": said, "needs": needs}, sys.stdout)


sys.meta_path.insert(0, Missing())
main()
