"""Four workers of a web server, one quota.

Each worker of uvicorn is a process that answers requests with an agent. The search service behind the agent's
tool takes 5 calls at once, and one more every 12 minutes, however many workers ask. Without a store each worker
lets 5 through; with a store in shared memory, all of them together do.

Runs offline, with a scripted model, on Linux: python examples/agent_framework/workers.py
(It needs uvicorn. `CALLGATE_STORE=shm:/run/myapp/callgate uvicorn workers:app --workers 4` serves the same.)
"""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Annotated, Any
from urllib.request import ProxyHandler, build_opener

import uvicorn
from agent_framework import Agent, tool
from offline import OfflineChatClient

from callgate import Limiter
from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware

WORKERS = 4
BURST = 5

# This module is imported by each worker: the store is what they have in common.
LIMITER = Limiter(
    {"search": ToolRateLimit.parse("5/h", burst=BURST)}, store=os.environ.get("CALLGATE_STORE")
)
RATE_LIMITER = ToolRateLimitMiddleware(LIMITER)


@tool(approval_mode="never_require")
async def search(text: Annotated[str, "What to search for"]) -> str:
    """Searches the documents, with a service that all workers share."""
    return f"{text}: 3 documents"


async def app(
    _scope: Mapping[str, Any],
    _receive: Callable[[], Awaitable[Mapping[str, Any]]],
    send: Callable[[Mapping[str, Any]], Awaitable[None]],
) -> None:
    """Answers a request with a run of the agent: by which worker, and what the tool said."""
    client = OfflineChatClient([("1", "search", {"text": "invoices"})], "done")
    agent = Agent(client=client, tools=[search], middleware=[RATE_LIMITER])
    response = await agent.run("Which invoices are there?")
    [said] = [
        str(content.result)
        for message in response.messages
        for content in message.contents
        if content.type == "function_result"
    ]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{os.getpid()} {said}".encode()})


def main() -> None:
    """Serves without a store, and then with one."""
    print("Without a store:")
    serve()

    # An application takes a folder of its own, such as /run/myapp.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ["CALLGATE_STORE"] = f"shm:{folder}/callgate"
        print("\nWith one:")
        serve()


def serve() -> None:
    """Runs the server until somebody has asked all that there is to ask."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        client = Thread(target=ask_all, args=(listening.getsockname()[1],))
        client.start()
        uvicorn.run(
            "workers:app",
            fd=listening.fileno(),
            workers=WORKERS,
            app_dir=str(Path(__file__).parent),
            lifespan="off",
            log_level="error",
        )
        client.join()


def ask_all(port: int) -> None:
    """Asks until each worker has refused a call, prints how many ran, and ends the server."""
    try:
        ran: Counter[str] = Counter()
        refused: dict[str, str] = {}
        with ThreadPoolExecutor(8) as pool:
            while len(refused) < WORKERS:
                for worker, said in pool.map(ask, [port] * 8):
                    if "documents" in said:
                        ran[worker] += 1
                    else:
                        refused[worker] = said
        each = " + ".join(str(ran[worker]) for worker in sorted(refused))
        print(f"  {each} = {ran.total()} calls ran; the service takes {BURST}.")
        print(f"  Then the model reads: {refused.popitem()[1]}")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def ask(port: int) -> tuple[str, str]:
    """One request: which worker answered, and what its tool said."""
    opener = build_opener(ProxyHandler({}))  # The server is on this machine, behind no proxy.
    with opener.open(f"http://127.0.0.1:{port}/", timeout=30) as response:
        worker, _, said = str(response.read(), "utf-8").partition(" ")
    return worker, said


if __name__ == "__main__":
    main()
