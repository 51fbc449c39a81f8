"""What a test saw and when, written down for people."""

from __future__ import annotations

import time
from pathlib import Path


class Story:
    """Lines with the seconds since the start, to a file and to the terminal (pytest -s)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = time.time()

    def tell(self, line: str, *, at: float | None = None) -> None:
        """Write a line down.

        Args:
          line: what was seen.
          at: when, in seconds since the epoch; None is now.
        """
        seconds = (time.time() if at is None else at) - self._start
        text = f"{seconds:7.2f} s  " + line.strip().replace("\n", "\n" + " " * 11)
        with self.path.open("a") as file:
            file.write(f"{text}\n")
        print(text, flush=True)
