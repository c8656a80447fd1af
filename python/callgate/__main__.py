"""The command `callgate`: `python -m callgate`, and the package's script."""

from __future__ import annotations

import signal
import sys

from callgate import _callgate


def main() -> int:
    """Runs the command with this process's arguments.

    Returns:
        Its exit code: 0 where all is well, 1 where it is not, 2 where the arguments cannot be understood.
    """
    # The command writes to the process's own streams, after what Python has kept for them.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python would note Ctrl-C and go on waiting for the command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _callgate.main(["callgate", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
