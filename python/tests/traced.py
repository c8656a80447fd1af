"""Traces calls without a framework, and reads what was written of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from callgate import Limiter, ToolRateLimit, Trace
from callgate._callgate import TracedCall

LIMITER = Limiter({"search": ToolRateLimit(1e9, burst=4_294_967_295)})


def trace_call(trace: Trace, tool: str = "search", **fields: str) -> None:
    """A call that goes well, as a front end traces it."""
    call = TracedCall(trace)
    assert LIMITER._admit(tool, None, lambda _context, _names: fields, None, call) is None
    call.decided(admitted=True, waited=False)
    call.ended()


def written(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a trace, with those of older files, which must all be whole."""
    for file in [path, *path.parent.glob(f"{path.name}.*")]:
        text = file.read_text()
        assert text == "" or text[-1] == "\n"
        yield from map(json.loads, text.splitlines())
