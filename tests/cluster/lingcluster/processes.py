"""Long-lived local programs: started with a log file, awaited until ready, always ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lingcluster import guardian

_TAIL_BYTES = 6000


class NotReadyError(Exception):
    """A program ended, or did not answer, before it was ready; the message holds its log's end."""


class Session:
    """Owns every process of one test session; nothing outlives it, a SIGKILL of it included.

    Processes belong to it by the mark in their environment (see `guardian`).
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, self.mark],
            stdin=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", "")},
            start_new_session=True,  # Ctrl-C is for the tests, which end in order
        )

    def environment(self) -> dict[str, str]:
        """Return the mark as environment variables for a process that shall not outlive this."""
        return {guardian.MARK_VARIABLE: self.mark}

    def close(self) -> bool:
        """Kill what is left; return True when nothing was."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        return self._guardian.wait(timeout=30) != guardian.LEFTOVERS_FOUND

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process:
    """A program in its own process group, its output in a file.

    Args:
      name: for messages.
      argv: the program and its arguments.
      log: file its stdout and stderr are appended to.
      session: whose mark it carries.
      environment: the whole environment, the mark apart; None for this process's own.
      cwd: its working directory.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        session: Session,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        base = os.environ if environment is None else environment
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**base, **session.environment()},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code (negative: the signal), None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        """Return the end of the log."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def wait_ready(self, is_ready: Callable[[], bool], *, timeout: float) -> None:
        """Poll `is_ready` until it holds.

        Args:
          is_ready: may raise OSError, which counts as not ready.
          timeout: seconds.

        Raises:
          NotReadyError: the program ended or the time is over.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.returncode is not None:
                msg = (
                    f"{self.name} ended with {self.returncode}; end of {self.log}:\n{self.tail()}"
                )
                raise NotReadyError(msg)
            with contextlib.suppress(OSError):
                if is_ready():
                    return
            time.sleep(0.05)
        raise NotReadyError(self._explain(f"not ready after {timeout:.0f} s"))

    def _explain(self, what: str) -> str:
        return f"{self.name} {what}; end of {self.log}:\n{self.tail()}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program alone; one that has ended is left alone."""
        self._process.send_signal(number)

    def wait(self, *, timeout: float) -> int:
        """Return the exit code once it ends.

        Raises:
          subprocess.TimeoutExpired: it did not end in `timeout` seconds.
        """
        return self._process.wait(timeout)

    def stop(self, *, grace: float = 5.0) -> int:
        """SIGTERM, after `grace` seconds SIGKILL to its whole group; return the exit code."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=grace)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to its whole group; return the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait(timeout=30)


def answers(url: str) -> bool:
    """Tell whether a GET is answered with 200."""
    with urllib.request.urlopen(url, timeout=2) as answer:
        return answer.status == 200
