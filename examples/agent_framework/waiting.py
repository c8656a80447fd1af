"""Eight calls at once of a tool whose service takes four a second.

The service runs on this machine and speaks HTTP; a fifth request within a second it refuses with 429.
Without callgate half of the calls fail. With it they wait for their turn, and all succeed.

Runs offline, with a scripted model: python examples/agent_framework/waiting.py
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Annotated
from urllib.request import ProxyHandler, build_opener

from agent_framework import Agent, FunctionMiddleware, tool
from offline import OfflineChatClient

from callgate.agent_framework import ToolRateLimit, ToolRateLimitMiddleware

NAMES = ["Ada", "Alan", "Barbara", "Donald", "Edsger", "Frances", "Grace", "Tony"]


def agent(url: str, middleware: list[FunctionMiddleware]) -> Agent:
    """An agent whose model looks up eight customers at once."""
    opener = build_opener(ProxyHandler({}))  # The service is on this machine, behind no proxy.

    def get(name: str) -> str:
        with opener.open(f"{url}/customers/{name.lower()}", timeout=10) as response:
            return str(response.read(), "utf-8")

    @tool(approval_mode="never_require")
    async def lookup_customer(name: Annotated[str, "The customer's name"]) -> str:
        """Looks a customer up in the CRM, which allows 4 requests in any second."""
        return await asyncio.to_thread(get, name)

    calls = [(name, "lookup_customer", {"name": name}) for name in NAMES]
    return Agent(
        client=OfflineChatClient(calls, "done"), tools=[lookup_customer], middleware=middleware
    )


async def main() -> None:
    """Runs the agent without callgate, and then with it."""
    # The framework logs the errors of tools; what is printed here tells of them.
    logging.getLogger("agent_framework").addHandler(logging.NullHandler())

    print("Without callgate:")
    await run([])

    # Requests reach the service some time after they were admitted, now more and now less. There is
    # room for that: this quota lets one call through at once and then 3 a second, so that any five
    # calls are spread over 4/3 s, and the service counts over 1 s.
    limit = ToolRateLimit.quota(4, per="s", max_wait=10)
    print("\nWith callgate, one at once and then 3 a second (never more than 4 in any second):")
    await run([ToolRateLimitMiddleware({"lookup_customer": limit})])


async def run(middleware: list[FunctionMiddleware]) -> None:
    """Runs the agent on a service of its own, and prints what that answered and when."""
    with crm() as (url, answers):
        response = await agent(url, middleware).run("How are our customers?")
    start, _ = answers[0]
    for moment, status in answers:
        print(f"  {moment - start:.2f} s  {status} {status.phrase}")
    results = [
        content
        for message in response.messages
        for content in message.contents
        if content.type == "function_result"
    ]
    succeeded = sum("active since" in str(result.result) for result in results)
    refused = sum(status == HTTPStatus.TOO_MANY_REQUESTS for _, status in answers)
    print(f"  {succeeded} of {len(results)} calls succeeded, the service refused {refused}.")


@contextmanager
def crm() -> Generator[tuple[str, list[tuple[float, HTTPStatus]]]]:
    """Serves at most 4 requests in any second: the address, and each answer with its time."""
    answers: list[tuple[float, HTTPStatus]] = []
    served = deque[float](maxlen=4)
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                now = time.monotonic()
                wait = served[0] + 1 - now if len(served) == 4 else 0
                status = HTTPStatus.TOO_MANY_REQUESTS if wait > 0 else HTTPStatus.OK
                answers.append((now, status))
                if status == HTTPStatus.OK:
                    served.append(now)
            self.send_response(status)
            if status != HTTPStatus.OK:
                self.send_header("Retry-After", str(math.ceil(wait)))
            self.end_headers()
            if status == HTTPStatus.OK:
                self.wfile.write(b"active since 2019")

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 8  # They all connect at once.

    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", answers
        finally:
            server.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
