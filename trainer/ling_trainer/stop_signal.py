"""SIGTERM and Ctrl-C, answered even while Python runs no byte code."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Literal, NoReturn

type Phase = Literal["starting", "training", "leaving"]

INTERRUPTED = 130
"""Exit code of Ctrl-C without a checkpoint, as shells write it."""


class StopSignal:
    """What a signal means depends on the phase.

    - starting: there is nothing to save, so the process ends at once, 143 for SIGTERM and 130 for
      Ctrl-C. A thread that reads Python's wake-up descriptor does it: a Python handler would wait
      for the main thread, which may sit in `jax.distributed.initialize` for minutes; and without
      any handler the first process of a container ignores SIGTERM.
    - training: `requested` turns true, and the loop stops after a step that all processes agree
      on. A second Ctrl-C ends the process at once with 130; a second SIGTERM changes nothing,
      since the checkpoint it would interrupt is what SIGTERM asked for.
    - leaving: nothing; the exit code is decided.
    """

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.requested = False
        self._on_early_end: Callable[[int], None] | None = None

    def install(self, on_early_end: Callable[[int], None] | None = None) -> None:
        """Take over SIGTERM and SIGINT; call it once, from the main thread.

        Args:
          on_early_end: told the exit code right before the process ends in the starting phase.
        """
        self._on_early_end = on_early_end
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)  # the wake-up descriptor needs a Python handler
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()

    def _read(self, reader: int) -> NoReturn:
        while True:
            for number in os.read(reader, 64):
                self._answer(number)

    def _answer(self, number: int) -> None:
        if number not in {signal.SIGTERM, signal.SIGINT} or self.phase == "leaving":
            return
        code = INTERRUPTED if number == signal.SIGINT else 128 + signal.SIGTERM
        if self.phase == "starting":
            if self._on_early_end:
                self._on_early_end(code)
            os._exit(code)
        if self.requested and number == signal.SIGINT:
            os._exit(code)
        self.requested = True


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the thread of StopSignal answers."""
