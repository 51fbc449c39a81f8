"""TrainingRuns as rows of a table, and which of them to show. Pure."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ling_operator.api import ENDED, GROUP, KIND, ConditionType, Phase
from ling_operator.bounded_text import clip

type Raw = dict[str, Any]
type Row = tuple[str, ...]

NOTHING = "-"
GAP = 3
"""Spaces between columns."""
_MESSAGE_BYTES = 120
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_EVERYTHING = "EVERYTHING"
_WORDS: dict[str, frozenset[Phase]] = {
    "FINISHED": ENDED,
    "SUCCESSFUL": frozenset({Phase.COMPLETE}),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
      shown: always, only in wide tables, or only where runs of several namespaces are shown.
      moves: its value changes with time alone, which is no news.
    """

    title: str
    cell: Callable[[Raw, datetime], str]
    shown: str = "always"
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Filter:
    """Which runs to show.

    Attributes:
      phases: any of these; None for all, those that this version does not know too.
      name: found in the name.
    """

    phases: frozenset[Phase] | None = None
    name: re.Pattern[str] = re.compile("")

    def takes(self, run: Raw) -> bool:
        """Tell whether to show a run."""
        if self.name.search(run["metadata"]["name"]) is None:
            return False
        return self.phases is None or _status(run).get("phase", Phase.PENDING) in self.phases


def parse_phases(text: str) -> frozenset[Phase] | None:
    """Read phases, separated by commas, or xpk's words for some of them; None for everything.

    Raises:
      ValueError: a word that is none of them.
    """
    phases = {phase.upper(): frozenset({phase}) for phase in Phase} | _WORDS
    chosen: frozenset[Phase] = frozenset()
    words = [word.strip().upper() for word in text.split(",")]
    if _EVERYTHING in words:
        return None
    for word in words:
        found = phases.get(word)
        if found is None:
            choices = ", ".join([_EVERYTHING, *_WORDS, *Phase])
            msg = f"{word!r} is no status; choose from {choices}"
            raise ValueError(msg)
        chosen |= found
    return chosen


def columns(*, wide: bool, namespaces: bool) -> tuple[Column, ...]:
    """Return the columns to show."""
    left_out = {"wide": not wide, "namespaces": not namespaces}
    return tuple(column for column in _COLUMNS if not left_out.get(column.shown, False))


def row_of(run: Raw, chosen: Iterable[Column], now: datetime) -> Row:
    """Return a cell for each column."""
    return tuple(column.cell(run, now) for column in chosen)


def news_of(run: Raw, chosen: Iterable[Column], now: datetime) -> Row:
    """Return the cells that change only when the run does."""
    return tuple(column.cell(run, now) for column in chosen if not column.moves)


def widths_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """Return how wide each column is, the gap to the next included."""
    return tuple(max(map(len, column)) + GAP for column in zip(*rows, strict=True))


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    widths = widths_of(rows)
    return [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def full_name(run: Raw) -> str:
    """Return a run's name as kubectl writes it."""
    return f"{KIND.lower()}.{GROUP}/{run['metadata']['name']}"


def attempts_of(run: Raw, now: datetime) -> list[Row]:
    """Return a table of a run's attempts, with its header."""
    rows: list[Row] = [("ATTEMPT", "STARTED", "LASTED", "STEPS", "ENDED BY")]
    for attempt in _status(run).get("attempts", []):
        began = datetime.fromisoformat(attempt["startTime"])
        end = attempt.get("endTime")
        lasted = (datetime.fromisoformat(end) if end else now) - began
        steps = f"{attempt.get('firstStep', NOTHING)} to {attempt.get('lastStep', NOTHING)}"
        started = began.strftime("%Y-%m-%d %H:%M:%S")
        reason = attempt.get("reason", NOTHING)
        rows.append((str(attempt["attempt"]), started, duration(lasted), steps, reason))
    return rows


def last_evidence(run: Raw) -> Raw | None:
    """Return what the present attempt left, None where nothing was kept."""
    attempts = _status(run).get("attempts", [])
    return attempts[-1].get("evidence") if attempts else None


def duration(span: timedelta) -> str:
    """Write a duration as kubectl does: its largest unit, or two where the first is small."""
    seconds = max(round(span.total_seconds()), 0)
    for (size, unit), (smaller, small_unit) in itertools.pairwise(_UNITS):
        if seconds >= 10 * size:
            return f"{seconds // size}{unit}"
        if seconds >= 2 * size:
            rest = seconds % size // smaller
            return f"{seconds // size}{unit}" + (f"{rest}{small_unit}" if rest else "")
    return f"{seconds}s"


def _part(of: Raw, key: str) -> Raw:
    """Return a member that is an object, an empty one where it is not there."""
    return of.get(key) or {}


def _status(run: Raw) -> Raw:
    return _part(run, "status")


def _health(run: Raw, _: datetime) -> str:
    condition = _condition(run, ConditionType.HEALTHY)
    if condition is None or condition["status"] == "Unknown":
        return "Unknown"
    return "Healthy" if condition["status"] == "True" else condition["reason"]


def _condition(run: Raw, kind: ConditionType) -> Raw | None:
    return next((c for c in _status(run).get("conditions", []) if c["type"] == kind), None)


def _message(run: Raw, _: datetime) -> str:
    """Return what a condition says that explains where the run is."""
    for kind, status in (
        (ConditionType.HALTED, "True"),
        (ConditionType.FAILED, "True"),
        (ConditionType.CREATED, "False"),
        (ConditionType.HEALTHY, "False"),
        (ConditionType.ADMITTED, "False"),
        (ConditionType.PODS_READY, "False"),
    ):
        found = _condition(run, kind)
        if found is not None and found["status"] == status:
            return clip(found.get("message", "").replace("\n", " "), _MESSAGE_BYTES) or NOTHING
    return NOTHING


def _machines(run: Raw, _: datetime) -> str:
    """Return what the run asks for, in its spec's words."""
    spec = _part(run, "spec")
    tpu, cpu, watch = _part(spec, "tpu"), _part(spec, "cpu"), _part(spec, "watch")
    if tpu:
        shape = f"{tpu.get('accelerator', '?')} {tpu.get('topology', '')}".strip()
        return f"{shape} x{tpu.get('slices', 1)}"
    if watch:
        return f"watch {watch.get('jobSet', '?')}"
    return f"cpu x{cpu.get('processes', 1)}"


def _eta(run: Raw, now: datetime) -> str:
    end = _training(run).get("estimatedCompletionTime")
    return duration(datetime.fromisoformat(end) - now) if end else NOTHING


def _mttr(run: Raw, _: datetime) -> str:
    mean = _part(_status(run), "mttr").get("meanSeconds")
    return duration(timedelta(seconds=mean)) if mean is not None else NOTHING


def _age(run: Raw, now: datetime) -> str:
    return duration(now - datetime.fromisoformat(run["metadata"]["creationTimestamp"]))


def _training(run: Raw) -> Raw:
    return _part(_status(run), "training")


def _of_training(field: str) -> Callable[[Raw, datetime], str]:
    return lambda run, _: str(_training(run).get(field) or NOTHING)


def _of_status(field: str) -> Callable[[Raw, datetime], str]:
    return lambda run, _: str(_status(run).get(field, NOTHING))


_COLUMNS = (
    Column("NAMESPACE", lambda run, _: run["metadata"].get("namespace", ""), "namespaces"),
    Column("NAME", lambda run, _: run["metadata"]["name"]),
    Column("PHASE", lambda run, _: str(_status(run).get("phase", Phase.PENDING))),
    Column("STEP", _of_training("step")),
    Column("TARGET", _of_training("targetSteps")),
    Column("LOSS", _of_training("loss")),
    Column("HEALTH", _health),
    Column("AGE", _age, moves=True),
    Column("MACHINES", _machines, "wide"),
    Column("ATTEMPT", _of_status("attempt"), "wide"),
    Column("RESTARTS", _of_status("restarts"), "wide"),
    Column("TOKENS/S", _of_training("tokensPerSecond"), "wide"),
    Column("ETA", _eta, "wide", moves=True),
    Column("CHECKPOINT", _of_status("lastFiniteCheckpoint"), "wide"),
    Column("MTTR", _mttr, "wide"),
    Column("MESSAGE", _message, "wide"),
)
