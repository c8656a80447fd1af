"""An MCP server on stdio whose tool writes a file for each call, so that others see which ran."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def server_class() -> Any:
    """The server, which the SDK's major versions call by different names."""
    try:
        return import_module("mcp.server").MCPServer
    except AttributeError:
        return import_module("mcp.server.fastmcp").FastMCP


def main() -> None:
    """Serves until its input ends."""
    started = Path(sys.argv[1])
    server = server_class()("files")

    @server.tool()  # type: ignore[untyped-decorator]
    def lookup(call: str) -> str:
        """Finds something."""
        (started / call).touch()
        return f"lookup found {call}"

    server.run("stdio")


if __name__ == "__main__":
    main()
