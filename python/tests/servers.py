"""A server of a test's own: `redis-server`, or the program that `CALLGATE_REDIS_SERVER` names."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 30
"""Seconds that anything may take that goes well."""


def free_port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Server:
    """Listens at a free port of this host, and ends with the test."""

    def __init__(self, *arguments: str) -> None:
        """Starts it.

        Args:
            arguments: More of its options.
        """
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="callgate-redis-"))
        self._arguments = arguments
        self._process = self._run()

    def url(self, prefix: str = "test", timeout: str = "20s") -> str:
        """Where it is, for a limiter."""
        return f"redis://127.0.0.1:{self.port}/0?prefix={prefix}&timeout={timeout}"

    def ask(self, *command: str) -> str:
        """What it answers to a command, in words."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            parts = [f"*{len(command)}\r\n"]
            parts += [f"${len(word.encode())}\r\n{word}\r\n" for word in command]
            connection.sendall("".join(parts).encode())
            with connection.makefile("rb") as answers:
                first = answers.readline().decode().rstrip()
                if first.startswith("$") and first != "$-1":
                    return answers.read(int(first[1:])).decode()
                return first[1:]

    def scripts(self) -> int:
        """How many requests of callgate's it has run."""
        stats = self.ask("INFO", "commandstats").splitlines()
        evals = [line for line in stats if line.startswith("cmdstat_eval")]
        return sum(int(line.split("calls=")[1].split(",")[0]) for line in evals)

    def clients(self) -> int:
        """How many others are connected."""
        [line] = [
            line for line in self.ask("INFO", "clients").splitlines() if "connected_clients" in line
        ]
        return int(line.split(":")[1]) - 1

    def time(self) -> float:
        """What time it makes it, in seconds."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            connection.sendall(b"TIME\r\n")
            with connection.makefile("rb") as answers:
                lines = [answers.readline().decode().strip() for _ in range(5)]
        return int(lines[2]) + int(lines[4]) / 1e6

    @property
    def process(self) -> int:
        """The number of its process."""
        return self._process.pid

    def halt(self) -> None:
        """Stands still: what is sent is not answered."""
        os.kill(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        os.kill(self.process, signal.SIGCONT)

    def stop(self) -> None:
        """Ends it at once; what it held is gone."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Starts it where it was."""
        self._process = self._run()

    def close(self) -> None:
        """Ends it, and all that is left of it."""
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self) -> subprocess.Popen[bytes]:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        options += ["--appendonly", "no", "--unixsocket", "socket", *self._arguments]
        process = subprocess.Popen(
            [os.environ.get("CALLGATE_REDIS_SERVER", "redis-server"), *options],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + PATIENCE
        while not self._listens():
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.005)
        return process

    def _listens(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def cluster() -> Generator[list[Server], None, None]:
    """Three nodes, each with a third of the slots."""
    ports = [str(free_port()) for _ in range(3)]
    nodes = [Server("--cluster-enabled", "yes", "--cluster-port", port) for port in ports]
    try:
        for place, node in enumerate(nodes):
            first, last = 5462 * place, min(5462 * place + 5461, 16383)
            node.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            node.ask("CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port), ports[0])
        end = time.monotonic() + PATIENCE
        while not all("cluster_slots_ok:16384" in node.ask("CLUSTER", "INFO") for node in nodes):
            assert time.monotonic() < end, "the nodes make no cluster"
            time.sleep(0.02)
        while not all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in nodes):
            assert time.monotonic() < end, "the cluster does not start"
            time.sleep(0.02)
        yield nodes
    finally:
        for node in nodes:
            node.close()
