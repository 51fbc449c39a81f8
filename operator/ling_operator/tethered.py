"""Run a command that is asked to stop when its parent dies: `python tethered.py PARENT COMMAND`.

A wrapper instead of a function between fork and exec, which may deadlock in a threaded process.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to the parent whose id is the first argument, then become the rest.

    On Linux the kernel sends SIGTERM when the parent is gone, however it died, so a trainer
    checkpoints and leaves. Elsewhere the command simply runs.
    """
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the tie was there
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's own


if __name__ == "__main__":
    main()
