"""What people see: lines, colours, and a local run's live row on a terminal."""

import sys
import time
from collections.abc import Mapping
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ling_operator.api import ConditionType, Phase, TrainingRunStatus
from ling_operator.conditions import find
from ling_operator.progress import loss_text
from ling_operator.verdict import HealthSample

COLUMNS = ("PHASE", "STEP", "TARGET", "LOSS", "HEALTH", "TOKENS/S")
LINE_SECONDS = 5.0
_COLOURS = {
    Phase.RUNNING: "green",
    Phase.COMPLETE: "green",
    Phase.HALTED: "red",
    Phase.FAILED: "red",
    Phase.CANCELLED: "red",
    Phase.SUSPENDED: "yellow",
}


_ANSI = {"green": 32, "red": 31, "yellow": 33, "cyan": 36}


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to colour what is written: on a terminal that can, unless NO_COLOR is set."""
    refused = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return stream.isatty() and not refused


def paint(text: str, phase: Phase) -> str:
    """Return text in a phase's colour, for a terminal."""
    return f"\033[{_ANSI[_COLOURS.get(phase, 'cyan')]}m{text}\033[0m"


def print_line(text: str) -> None:
    """Print a line of a command's output, at once also into a pipe."""
    print(text, flush=True)  # noqa: T201 - the command's output


def print_error(text: str) -> None:
    """Print a line that is not the output itself."""
    print(f"ling: {text}", file=sys.stderr)  # noqa: T201 - the command's output


class Display:
    """Shows a run's row, and messages above it; colour only on a terminal.

    Without a terminal a line is printed when the phase changes, and when the step has moved and
    the last line is LINE_SECONDS old.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._row: tuple[str, ...] = ()
        self._printed: tuple[str, ...] = ()
        self._printed_at = float("-inf")

    def __enter__(self) -> Self:
        """Begin."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last row standing."""
        if self._live is not None:
            self._live.stop()
        elif self._row != self._printed:
            self._print()

    def say(self, message: str) -> None:
        """Print a message."""
        self._console.print(message, markup=False)

    def show(self, status: TrainingRunStatus, sample: HealthSample | None) -> None:
        """Show where the run is; the sample is fresher than the status."""
        row = row_of(status, sample)
        if row == self._row:
            return
        self._row = row
        if self._live is not None:
            self._live.update(_table(row, status.phase), refresh=True)
            return
        phase_changed = row[0] != (self._printed[0] if self._printed else "")
        if phase_changed or time.monotonic() - self._printed_at >= LINE_SECONDS:
            self._print()

    def _print(self) -> None:
        if not self._printed:
            self.say(_line(COLUMNS))
        self.say(_line(self._row))
        self._printed, self._printed_at = self._row, time.monotonic()


def row_of(status: TrainingRunStatus, sample: HealthSample | None) -> tuple[str, ...]:
    """Return a cell for each of COLUMNS; '-' for what is not known."""
    training = status.training
    step, loss, speed = training.step, training.loss, training.tokens_per_second
    if sample is not None and sample.step is not None and sample.step >= step:
        step, loss = sample.step, loss_text(sample.loss) if sample.step else None
        speed = _whole(sample.tokens_per_second)
    target = training.target_steps or (sample.target_steps if sample is not None else None)
    return (
        status.phase.value,
        str(step) if step else "-",
        str(target) if target else "-",
        loss or "-",
        _health(status),
        str(speed) if speed else "-",
    )


def _whole(speed: float | None) -> int | None:
    # NaN and infinities fail the comparison.
    return round(speed) if speed is not None and 0 <= speed < 2**53 else None


def _health(status: TrainingRunStatus) -> str:
    if status.halt is not None:
        return status.halt.reason
    condition = find(status.conditions, ConditionType.HEALTHY)
    if condition is None or condition.status == "Unknown":
        return "Unknown"
    return "Healthy" if condition.status == "True" else condition.reason


def _line(cells: tuple[str, ...]) -> str:
    widths = (12, 7, 7, 10, 18, 9)
    pairs = zip(cells, widths, strict=True)
    return "".join(cell.ljust(width) for cell, width in pairs).rstrip()


def _table(row: tuple[str, ...], phase: Phase) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column)
    colour = _COLOURS.get(phase, "cyan")
    table.add_row(f"[{colour}]{row[0]}[/{colour}]", *row[1:])
    return table
