"""What a person sees: one stable log line a step, and a progress bar on a terminal."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger("ling_trainer")

LINE_KEYS = (
    "learning/loss",
    "learning/lm_loss",
    "learning/raw_grad_norm",
    "learning/learning_rate",
    "perf/step_time_seconds",
    "perf/tokens_per_second",
)
"""The values of a step's line; it shows the last part of their log key."""


def step_line(step: int, target_steps: int, values: Mapping[str, float]) -> str:
    """Write a step as space-separated key=value pairs; keys and their order do not change.

    Example: step=12 target=200 loss=5.013260 lm_loss=4.902100 raw_grad_norm=0.71 ...
    """
    pairs = [f"step={step}", f"target={target_steps}"]
    pairs += [_pair(key.rpartition("/")[2], values[key]) for key in LINE_KEYS]
    return " ".join(pairs)


def evaluation_line(step: int, values: Mapping[str, float]) -> str:
    """Write an evaluation as space-separated key=value pairs, in the order of the values.

    Example: eval_step=12 eval_lm_loss=4.902100 eval_mtp_loss=4.950000 ...
    """
    pairs = [_pair(key.replace("/", "_"), value) for key, value in values.items()]
    return " ".join([f"eval_step={step}", *pairs])


def _pair(name: str, value: float) -> str:
    """Write a value; a loss with six decimals, so that two runs can be compared by eye."""
    return f"{name}={value:.6f}" if name.endswith("loss") else f"{name}={value:.6g}"


class Console:
    """Log to standard output (a cluster's log collector takes standard error for errors)."""

    def __init__(self, *, process: int, start: int, target_steps: int) -> None:
        """Set up logging, and the bar where process 0 has a terminal."""
        self._target_steps = target_steps
        self._bar: Progress | None = None
        if process == 0 and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), console=_TERMINAL,
            )  # fmt: skip
            self._task = self._bar.add_task("training", total=target_steps, completed=start)
            self._bar.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of a step."""
        log.info(step_line(step, self._target_steps, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of an evaluation; a warning where its loss is not finite."""
        level = logging.INFO if math.isfinite(values["eval/lm_loss"]) else logging.WARNING
        log.log(level, evaluation_line(step, values))

    def advance(self, step: int, loss: float) -> None:
        """Move the bar."""
        if self._bar:
            self._bar.update(self._task, completed=step, description=f"loss {loss:.4f}")

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_TERMINAL = RichConsole(file=sys.stdout)


def set_up_logging(process: int) -> None:
    """Write this package's log: time, level, process, message; in colour on a terminal."""
    handler: logging.Handler
    if sys.stdout.isatty():
        handler = RichHandler(console=_TERMINAL, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stdout)
        text = f"%(asctime)s.%(msecs)03dZ %(levelname)s process={process} %(message)s"
        formatter = logging.Formatter(text, datefmt="%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
