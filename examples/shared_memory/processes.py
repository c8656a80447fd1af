"""Four processes, one quota.

The search service takes 20 calls at once, and 60 more an hour, however many processes ask. Each of four
processes has a limiter of its own. Without a store each has a bucket of its own too, and they let through twice
what is allowed; with a store in shared memory, all draw from one bucket.

Runs offline, on Linux: python examples/shared_memory/processes.py
"""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.queues import Queue
from tempfile import TemporaryDirectory

from callgate import Limiter, ToolRateLimit

PROCESSES = 4
CALLS = 10
BURST = 20


def work(store: str | None, admitted: Queue[int]) -> None:
    """What each process does: asks for some calls, and counts those that may run."""
    limiter = Limiter({"search": ToolRateLimit.parse("60/h", burst=BURST)}, store=store)
    admitted.put(sum(limiter.try_acquire("search").admitted for _ in range(CALLS)))


def main() -> None:
    """Runs the processes without a store, and then with one."""
    print("Without a store:")
    run(None)

    # An application takes a folder of its own, such as /run/myapp: all its processes name the same.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        print("\nWith one:")
        run(f"shm:{folder}/callgate")


def run(store: str | None) -> None:
    """Starts the processes, and prints how many calls each of them was admitted."""
    context = get_context("spawn")
    admitted: Queue[int] = context.Queue()
    processes = [context.Process(target=work, args=(store, admitted)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    counts = [admitted.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    each = " + ".join(map(str, counts))
    print(f"  {each} = {sum(counts)} of {PROCESSES * CALLS} calls ran; the service takes {BURST}.")


if __name__ == "__main__":
    main()
