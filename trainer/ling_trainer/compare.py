"""Our losses beside Megatron's, step by step, and whether they agree. No JAX."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ling_trainer.journal import STEP_KEY, number
from ling_trainer.megatron_log import LM_LOSS, LoggedLosses

type Journal = Mapping[int, Mapping[str, float]]
"""Log keys and values by step."""

LM_KEYS = ("learning/lm_loss_token_avg", "learning/lm_loss")


class CompareError(ValueError):
    """A file cannot be compared; the message names it and says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Largest relative errors. The defaults are those by which the Ling team accepts a port."""

    first: float = 1e-4
    """At the first step compared: nothing has been learned yet, only the forward pass counts."""
    later: float = 1e-3
    """On the average of all later steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One line of Megatron's log and our mean over the same steps.

    Attributes:
      step: our last one.
      iteration: Megatron's last one.
      ours: our loss.
      megatron: theirs.
      error: |ours - megatron| / |megatron|; infinite where either is not finite.
    """

    step: int
    iteration: int
    ours: float
    megatron: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """One loss over all steps that both have.

    Attributes:
      name: lm_loss or mtp_d_loss.
      key: our log key that was compared.
      points: in order of steps; at least one.
      bar: that the verdict is by.
    """

    name: str
    key: str
    points: Sequence[Point]
    bar: Bar

    @property
    def first_error(self) -> float:
        """Relative error at the first step."""
        return self.points[0].error

    @property
    def mean_later_error(self) -> float | None:
        """Mean relative error of the later steps; None without any."""
        later = [point.error for point in self.points[1:]]
        return math.fsum(later) / len(later) if later else None

    @property
    def largest_error(self) -> float:
        """Largest relative error of any step."""
        return max(point.error for point in self.points)

    @property
    def first_outside(self) -> int | None:
        """First step whose own error is over the bar that holds at it; None without any."""
        for index, point in enumerate(self.points):
            if point.error > (self.bar.later if index else self.bar.first):
                return point.step
        return None

    @property
    def within(self) -> bool:
        """Whether the first error and the mean of the later ones are within the bar."""
        return self.first_error <= self.bar.first and (
            self.mean_later_error is None or self.mean_later_error <= self.bar.later
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything; numbers that are not finite as in metrics.jsonl."""
        later = self.mean_later_error
        return {
            "name": self.name,
            "key": self.key,
            "within": self.within,
            "first_error": number(self.first_error),
            "mean_later_error": None if later is None else number(later),
            "largest_error": number(self.largest_error),
            "first_step_outside": self.first_outside,
            "points": [
                {key: number(value) for key, value in asdict(point).items()}
                for point in self.points
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All losses that both logs have, and remarks about what was left out."""

    losses: Sequence[LossComparison]
    notes: Sequence[str]

    @property
    def within(self) -> bool:
        """Whether every loss is within the bar."""
        return all(loss.within for loss in self.losses)


def read_journal(path: Path) -> Journal:
    """Read metrics.jsonl; of steps that were done again, the later line counts.

    A last line that is cut off, as a killed process leaves it, is skipped.

    Raises:
      CompareError: the file cannot be read, another line is damaged, or there is no step.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}; name a file") from error
    steps: dict[int, dict[str, float]] = {}
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record.pop(STEP_KEY))
            steps[step] = {key: float(value) for key, value in record.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            if count == len(lines):
                break
            raise CompareError(
                f"{path}:{count} is no line of metrics.jsonl (an object with {STEP_KEY!r} and "
                "numbers); name the file that a run wrote"
            ) from None
    if not steps:
        raise CompareError(f"{path} holds no step; name the metrics.jsonl of a run that trained")
    return steps


def compare(
    ours: Journal,
    theirs: Sequence[LoggedLosses],
    *,
    lm_key: str | None,
    iteration_offset: int,
    bar: Bar,
) -> Comparison:
    """Compare every loss that both logs have.

    Args:
      ours: from read_journal.
      theirs: from megatron_log.parse_log.
      lm_key: our key beside Megatron's "lm loss"; None takes the first of LM_KEYS that is there.
      iteration_offset: Megatron's iteration less our step.
      bar: what is close enough.

    Raises:
      CompareError: there is no language model loss, or no step in common.
    """
    names = {name for line in theirs for name in line.losses}
    if LM_LOSS not in names:
        raise CompareError(
            f"Megatron's log has no line `iteration N/M | ... | {LM_LOSS}: ... |`; name the "
            "output of its last rank"
        )
    notes = _notes(theirs)
    used = [line for line in theirs if not line.skipped]
    keys = {key for record in ours.values() for key in record}
    losses: list[LossComparison] = []
    for name in sorted(names):
        key = _our_key(name, names, keys, lm_key)
        if key is None:
            notes.append(f"not compared: {name!r}, of which our log has no value")
            continue
        points = _points(ours, used, name, key, iteration_offset)
        if not points:
            raise CompareError(_nothing_in_common(ours, used, key, iteration_offset))
        losses.append(LossComparison(name=name.replace(" ", "_"), key=key, points=points, bar=bar))
    if len(names) == 1 and any(key.startswith("learning/raw_mtp") for key in keys):
        notes.append("not compared: multi-token prediction, which Megatron's log does not have")
    if len(losses[0].points) == 1:
        notes.append("only one step is compared: nothing is known of later ones")
    return Comparison(losses=losses, notes=notes)


def _our_key(name: str, names: set[str], keys: set[str], lm_key: str | None) -> str | None:
    """Return our log key of one of Megatron's losses."""
    if name == LM_LOSS:
        for key in (lm_key,) if lm_key else LM_KEYS:
            if key in keys:
                return key
        wanted = lm_key or " or ".join(LM_KEYS)
        raise CompareError(f"our log has no {wanted}; name the metrics.jsonl of a run")
    exact = f"learning/{name.replace(' ', '_')}"
    if exact in keys:
        return exact
    # One depth alone is the mean over depths.
    alone = names == {LM_LOSS, name} and "learning/raw_mtp_loss" in keys
    return "learning/raw_mtp_loss" if alone else None


def _points(
    ours: Journal, theirs: Sequence[LoggedLosses], name: str, key: str, offset: int
) -> list[Point]:
    points: list[Point] = []
    for line in theirs:
        steps = range(line.first - offset, line.last - offset + 1)
        if any(key not in ours.get(step, {}) for step in steps):
            continue
        mean = math.fsum(ours[step][key] for step in steps) / len(steps)
        points.append(
            Point(
                step=steps[-1],
                iteration=line.last,
                ours=mean,
                megatron=line.losses[name],
                error=relative_error(mean, line.losses[name]),
            )
        )
    return points


def relative_error(ours: float, reference: float) -> float:
    """Return |ours - reference| / |reference|; infinite where that is no finite number."""
    if ours == reference and math.isfinite(ours):
        return 0.0
    if not (math.isfinite(ours) and math.isfinite(reference)) or reference == 0:
        return math.inf
    return abs(ours - reference) / abs(reference)


def _notes(theirs: Sequence[LoggedLosses]) -> list[str]:
    notes: list[str] = []
    longest = max(line.last - line.first + 1 for line in theirs)
    if longest > 1:
        notes.append(
            f"Megatron's lines are means over up to {longest} iterations; they are compared with "
            "our means over the same steps"
        )
    if skipped := sum(line.skipped > 0 for line in theirs):
        notes.append(f"left out: {skipped} lines with iterations that Megatron skipped")
    return notes


def _nothing_in_common(
    ours: Journal, theirs: Sequence[LoggedLosses], key: str, offset: int
) -> str:
    steps = sorted(step for step, record in ours.items() if key in record)
    iterations = f"{theirs[0].first} to {theirs[-1].last}" if theirs else "all skipped"
    return (
        f"no step in common: ours with {key} are {steps[0]} to {steps[-1]}, Megatron's "
        f"iterations {iterations}, --iteration-offset {offset}; an offset of n puts our step s "
        "beside iteration s + n"
    )
