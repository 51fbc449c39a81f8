"""Megatron-LM's training log: the loss lines it prints, as numbers.

A line is ` iteration        2/     100 | consumed samples: ... | lm loss: 2.179000E+00 | ... |`,
with whatever a launcher put before it. Its losses are means over the iterations since the line
before, over those that were not skipped. A loss that is NaN is left out of the line.
Source: Megatron-LM megatron/training/training.py@001b00c2734d (training_log).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

type FirstLine = Literal["separate", "carried"]

LM_LOSS = "lm loss"
_LINE = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_LOSS = re.compile(r"lm loss|mtp_[1-9]\d* loss")
_START = "before the start of training step"
_SKIPPED, _NAN = "number of skipped iterations", "number of nan iterations"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLosses:
    """One line of the log.

    Attributes:
      first: first iteration that the losses are the mean over.
      last: last one, whose number the line carries.
      losses: by Megatron's name, such as "lm loss" and "mtp_1 loss"; NaN where the line leaves
        out what others have.
      skipped: iterations without an update though no loss was NaN; the means leave them out.
    """

    first: int
    last: int
    losses: dict[str, float]
    skipped: int


@dataclass(frozen=True, slots=True)
class _Line:
    iteration: int
    losses: dict[str, float]
    skipped: int
    nan: int
    starts: bool  # first line after a start of the program
    torn: bool  # ends without a line break


def parse_log(
    text: str, *, first_line: FirstLine, interval: int | None = None
) -> list[LoggedLosses]:
    """Read the loss lines of a log, in order of iterations.

    Where the program was started again, the lines of iterations done again are the later ones. A
    line that the log's end cuts off is left out.

    Args:
      text: of the log; may hold anything else besides.
      first_line: how the line after the first of a start was made. carried: a recent Megatron
        (see Source) prints the first iteration and keeps it in its sum, so that the next line is
        the mean of both; the first one is then taken out again. separate: older ones. With a log
        interval over 1 it is seen from the numbers, and this is not used.
      interval: iterations between two lines; None takes the most frequent distance.
    """
    lines = _without_repeated(_lines(text))
    names = {name for line in lines for name in line.losses}
    if lines and lines[-1].torn and lines[-1].losses.keys() != names:
        lines.pop()
    if interval is None:
        interval = usual_distance([line.iteration for line in lines])
    return list(_spans(lines, names, interval=interval, carried=first_line == "carried"))


def usual_distance(numbers: Sequence[int]) -> int:
    """Return the most frequent distance of neighbours, the largest of several; 1 without any."""
    gaps = Counter(b - a for a, b in itertools.pairwise(numbers))
    return max(gaps, key=lambda gap: (gaps[gap], gap), default=1)


def _lines(text: str) -> Iterator[_Line]:
    starts = True
    for line in text.splitlines(keepends=True):
        starts |= _START in line
        found = list(_LINE.finditer(line))  # several where processes wrote on one line
        for match, after in itertools.zip_longest(found, found[1:]):
            fields = line[match.end() : after.start() if after else None].split("|")
            torn = after is None and not line.endswith(("\n", "\r"))
            values = dict(_values(fields[:-1] if torn else fields))
            losses = {name: value for name, value in values.items() if _LOSS.fullmatch(name)}
            skipped, nan = (int(values.get(name, 0)) for name in (_SKIPPED, _NAN))
            yield _Line(int(match[1]), losses, skipped, nan, starts, torn)
            starts = False


def _values(fields: Iterable[str]) -> Iterator[tuple[str, float]]:
    for field in fields:
        name, _, value = field.rpartition(":")
        try:
            yield name.strip(), float(value)
        except ValueError:
            continue  # not a number, or another process's words in between


def _without_repeated(lines: Iterable[_Line]) -> list[_Line]:
    """Drop the lines of iterations that a later start did again."""
    kept: list[_Line] = []
    for line in lines:
        again = bool(kept) and line.iteration <= kept[-1].iteration
        while kept and kept[-1].iteration >= line.iteration:
            kept.pop()
        kept.append(replace(line, starts=True) if again else line)
    return kept


def _spans(
    lines: Sequence[_Line], names: set[str], *, interval: int, carried: bool
) -> Iterator[LoggedLosses]:
    """Give each line the iterations that its means are over, none of them twice."""
    before: LoggedLosses | None = None
    carries = False
    for line in lines:
        losses = {name: line.losses.get(name, math.nan) for name in sorted(names)}
        if line.nan:
            losses = dict.fromkeys(losses, math.nan)
        # A first iteration that no interval ends at is printed for its own sake.
        alone = line.starts and line.iteration % interval != 0
        first = line.iteration if alone else line.iteration - interval + 1
        logged = LoggedLosses(
            first=max(first, 1 if before is None else before.last + 1),
            last=line.iteration,
            losses=losses,
            skipped=0 if line.nan else line.skipped,
        )
        if carries and before is not None and not line.starts:
            logged = _take_out(before, logged)
        carries = alone or (line.starts and carried)
        before = logged
        yield logged


def _take_out(carried: LoggedLosses, logged: LoggedLosses) -> LoggedLosses:
    """Return the means of a line without the first iteration, which its sum still holds."""
    rest = logged.last - logged.first + 1
    losses = {
        name: (value * (rest + 1) - carried.losses[name]) / rest
        for name, value in logged.losses.items()
    }
    return replace(logged, losses=losses)
