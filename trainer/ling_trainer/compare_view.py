"""A comparison as tables on a terminal, and as a picture."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ling_trainer.compare import CompareError, Comparison, LossComparison, Point

_SHOWN = 12  # lines at each end of a long table


def show(found: Comparison) -> None:
    """Print the steps of each loss, what the verdict is by, and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    for loss in found.losses:
        console.print(_steps_table(loss))
    summary = Table("loss", "first", "mean of later", "largest", "first step outside", "")
    for loss in found.losses:
        summary.add_row(
            loss.name,
            _percent(loss.first_error),
            "-" if loss.mean_later_error is None else _percent(loss.mean_later_error),
            _percent(loss.largest_error),
            "-" if loss.first_outside is None else str(loss.first_outside),
            "within" if loss.within else "outside",
        )
    console.print(summary)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    bar = found.losses[0].bar
    verdict = "within" if found.within else "outside"
    console.print(
        f"{verdict} the bar: {_percent(bar.first)} at the first step, "
        f"{_percent(bar.later)} on the average of the later ones",
        soft_wrap=True,
    )


def _steps_table(loss: LossComparison) -> Table:
    table = Table(title=f"{loss.name} ({loss.key})")
    for heading in ("step", "iteration", "ours", "Megatron", "relative error"):
        table.add_column(heading, justify="right")
    points = list(loss.points)
    if len(points) <= 2 * _SHOWN:
        _add_rows(table, points)
    else:
        _add_rows(table, points[:_SHOWN])
        table.add_row(*["..."] * 5)
        _add_rows(table, points[-_SHOWN:])
    return table


def _add_rows(table: Table, points: Sequence[Point]) -> None:
    for p in points:
        table.add_row(
            str(p.step), str(p.iteration), f"{p.ours:.6f}", f"{p.megatron:.6f}", _percent(p.error)
        )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.3g} %"


def plot(found: Comparison, path: Path) -> None:
    """Draw the losses of both, and below them the relative errors with the bar's lines.

    Args:
      found: what compare returned.
      path: of the picture; its ending says the format.

    Raises:
      CompareError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CompareError(
            "--plot needs matplotlib; install the extra: pip install 'ling-tpu[plot]'"
        ) from None
    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for loss in found.losses:
        steps = [point.step for point in loss.points]
        (line,) = above.plot(steps, [point.ours for point in loss.points], label=loss.name)
        above.plot(
            steps,
            [point.megatron for point in loss.points],
            ls="none",
            marker=".",
            color=line.get_color(),
            label=f"{loss.name}, Megatron",
        )
        below.plot(steps, [point.error for point in loss.points], marker=".", label=loss.name)
    bar = found.losses[0].bar
    below.axhline(bar.first, color="grey", ls=":", lw=1, label="bar of the first step")
    below.axhline(bar.later, color="grey", ls="--", lw=1, label="bar of the later steps")
    above.set(ylabel="nats per token")
    below.set(xlabel="step", ylabel="relative error", yscale="log")
    for axes in (above, below):
        axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise CompareError(f"{path} cannot be written: {error}; name a .png file") from error
