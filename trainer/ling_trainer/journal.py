"""metrics.jsonl: every step of a run as one JSON line, whole across restarts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

STEP_KEY = "step"


def number(value: float) -> float | str:
    """Make a number that JSON can hold.

    JSON has no NaN and no infinity; as in Protocol Buffers' JSON mapping they become the strings
    NaN, Infinity and -Infinity, which `float` of Python reads back.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


class Journal:
    """Append a line a step, each handed to the system before the next step begins."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        """Open the file, and cut the lines of steps that will be done again.

        Args:
          path: of the file; its folder is made if need be.
          resumed_step: step of the restored checkpoint, 0 without one.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(_end_of_step(path, resumed_step))

    def append(self, step: int, now: float, log: Mapping[str, float]) -> None:
        """Write one step.

        Args:
          step: its number.
          now: seconds since the epoch.
          log: log keys and values.
        """
        record = {STEP_KEY: step, "time": round(now, 3)}
        record |= {key: number(value) for key, value in log.items()}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _end_of_step(path: Path, last: int) -> int:
    """Return the length of the file's leading part that is whole lines of steps up to `last`."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            step = _step_of(line)
            if step is None or step > last:
                break
            end += len(line)
    return end


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    step = record.get(STEP_KEY) if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
