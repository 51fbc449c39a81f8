"""The operator is killed with SIGKILL before and after each write of a run's life; nothing shows.

One life is undisturbed: submit, suspend, resume, a second attempt, a halt. In each other life the
operator dies once in each of these, always at the same number of write, and is started again. All
that users see afterwards has to be what they saw in the undisturbed life.
"""

from __future__ import annotations

import concurrent.futures
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from lingcluster import operator_process, sample_runs
from lingcluster.apart import SideBySide
from lingcluster.api_proxy import Moment
from lingcluster.audit import AuditLog
from lingcluster.client import Manifest, wait_for
from lingcluster.fault_table import FaultTable
from lingcluster.mortal_operator import KillPoint, MortalOperator
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns

AT_ONCE = 5
QUIET_SECONDS = 1.5
REFERENCE_QUIET_SECONDS = 4.0  # nothing says what it will look like
POLL_SECONDS = 0.2
PATIENCE = 120.0
NAME = "mortal"
STEPS = ("submit", "suspend", "resume", "attempt", "halt")
NEEDS = {"resume": "suspend"}
# No metrics, so that every write is a step's own and none is a clock's.
TRAINER = """
trap 'exit 143' TERM
while [ ! -e {nan} ]; do sleep 0.2 & wait $!; done
printf '{{"reason": "NonFiniteLoss", "step": "7", "lastFiniteStep": "6", "value": "nan"}}' \
  > /dev/termination-log
exit 90
"""


@dataclass(frozen=True)
class Sight:
    """What users see at rest; the same after every step of every life."""

    phase: str
    attempt: int
    restarts: int
    conditions: frozenset[tuple[str, str, str]]
    halt: tuple[str, int] | None
    attempts: tuple[tuple[int, str | None], ...]
    jobset: tuple[str, int] | None
    live_pods: int
    events: tuple[tuple[str, int], ...]


@dataclass
class Life:
    """One run in a namespace of its own, under an operator of its own.

    Attributes:
      seen: what was seen at the end of each step.
      writes: what the operator wrote in each step.
      died_at: where it was killed, by step.
    """

    runs: TrainingRuns
    operator: MortalOperator
    nan: Path
    seen: dict[str, Sight] = field(default_factory=dict)
    writes: dict[str, list[str]] = field(default_factory=dict)
    died_at: list[tuple[str, str]] = field(default_factory=list)

    def live(self, point: KillPoint | None, reference: Life | None) -> Life:
        """Go through the steps that have such a point, and those that they need."""
        for step in STEPS:
            if reference is not None and not reference.has(step, point):
                continue
            before = Counter(dict(self.sight().events)) if step != "submit" else Counter()
            self.operator.die_at(point)
            self._edit(step)
            expected = reference.seen[step] if reference is not None else None
            self.seen[step] = self._rest(step, before, expected)
            self.writes[step] = self.operator.writes()
            self.operator.die_at(None)
            self.died_at += [(step, at) for at in self.operator.died_at[len(self.died_at) :]]
        return self

    def has(self, step: str, point: KillPoint | None) -> bool:
        """Tell whether a life with a point has to go through a step."""
        number = point.number if point is not None else 0
        later = [each for each, needed in NEEDS.items() if needed == step]
        return step == "submit" or any(
            len(self.writes[each]) >= number
            for each in (step, *later, *NEEDS.get(step, "").split())
        )

    def _edit(self, step: str) -> None:
        match step:
            case "submit":
                script = TRAINER.format(nan=shlex.quote(str(self.nan)))
                health = {
                    "scrapeIntervalSeconds": 3600,
                    "metricsMissing": {"action": "Ignore"},
                }
                self.runs.apply(sample_runs.shell_run(NAME, script, health=health))
            case "suspend":
                self.runs.edit(NAME, suspend=True)
            case "resume":
                self.runs.edit(NAME, suspend=False)
            case "attempt":
                self.runs.edit(NAME, attempt=2)
            case _:
                self.nan.touch()

    def _rest(self, step: str, before: Counter[str], expected: Sight | None) -> Sight:
        """Wait until all is as expected and the operator has nothing more to write."""
        phase = {"suspend": "Suspended", "halt": "Halted"}.get(step, "Running")
        attempt = 2 if step in {"attempt", "halt"} else 1
        pods = 1 if phase == "Running" else 0
        quiet_seconds = QUIET_SECONDS if expected is not None else REFERENCE_QUIET_SECONDS
        last: list[tuple[float, Sight, list[str]]] = []

        def look() -> Sight | None:
            time.sleep(POLL_SECONDS)  # so that several at once do not keep the API server busy
            sight = self.sight(since=before)
            writes = self.operator.writes()
            if not last or last[-1][1:] != (sight, writes):
                last.append((time.monotonic(), sight, writes))
            arrived = (sight.phase, sight.attempt, sight.live_pods) == (phase, attempt, pods)
            right = expected is None or sight == expected
            quiet = time.monotonic() - last[-1][0] > quiet_seconds
            return sight if arrived and right and quiet else None

        def describe() -> str:
            seen = self.sight(since=before)
            return f"seen {seen}\nexpected {expected}\nkilled {self.operator.died_at}"

        return wait_for(f"rest after {step}", look, timeout=PATIENCE, describe=describe)

    def sight(self, since: Counter[str] | None = None) -> Sight:
        """Return what users see now; events are those that were not there before."""
        status = self.runs.status(NAME)
        halt = status.get("halt")
        jobset = self.runs.client.find(f"{self.runs.jobsets}/{NAME}")
        events = Counter(each["reason"] for each in self.runs.events(NAME))
        events.subtract(since or Counter())
        return Sight(
            phase=status.get("phase", ""),
            attempt=status.get("attempt", 0),
            restarts=status.get("restarts", 0),
            conditions=frozenset(
                (each["type"], each["status"], each["reason"])
                for each in status.get("conditions", [])
            ),
            halt=(halt["reason"], halt["step"]) if halt else None,
            attempts=tuple(
                (each["attempt"], each.get("reason")) for each in status.get("attempts", [])
            ),
            jobset=_jobset(jobset) if jobset is not None else None,
            live_pods=len(self.runs.live_pods(NAME)),
            events=tuple(sorted((reason, n) for reason, n in events.items() if n)),
        )


def _jobset(jobset: Manifest) -> tuple[str, int]:
    """Say whether a JobSet runs, and how many restarts it has spent.

    One that failed by the trainer's exit code before the operator came back needs no suspending.
    JobSet's `restarts` counts some resumes as well; those are not spent.
    """
    status = jobset.get("status", {})
    stopped = jobset["spec"].get("suspend") or status.get("terminalState")
    return "stopped" if stopped else "runs", status.get("restartsCountTowardsMax", 0)


@pytest.fixture
def begin(
    side_by_side: SideBySide, tmp_path: Path
) -> Callable[[KillPoint | None, Life | None], Life]:
    """Live a life to its end, in the caller's thread."""

    def live(point: KillPoint | None, reference: Life | None) -> Life:
        with side_by_side.apart() as place:
            operator = MortalOperator(place.start)
            place.proxy.gate = operator
            operator.wait_until_ready()
            life = Life(place.runs, operator, tmp_path / f"{place.namespace}.nan")
            return life.live(point, reference)

    return live


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_write_of_a_life_the_operator_ends_where_it_would_have_ended(
    begin: Callable[[KillPoint | None, Life | None], Life],
    audit_log: AuditLog,
    story: Story,
    faults: FaultTable,
) -> None:
    reference = begin(None, None)
    for step, writes in reference.writes.items():
        story.tell(f"{step}: {', '.join(writes)}")
    assert reference.seen["halt"].halt == ("NonFiniteLoss", 7)
    assert {n for sight in reference.seen.values() for _, n in sight.events} == {1}
    most = max(map(len, reference.writes.values()))
    points = [
        KillPoint(number, moment)
        for number in range(1, most + 1)
        for moment in get_args(Moment.__value__)
    ]
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        lives = list(pool.map(lambda point: begin(point, reference), points))
    deaths = [death for life in lives for death in life.died_at]
    for step, at in sorted(deaths):
        story.tell(f"killed in {step} {at}")
    for life in lives:
        assert life.seen == {step: reference.seen[step] for step in life.seen}
        created = [
            each
            for each in audit_log.records(user=operator_process.USER, code=201)
            if each.resource == "jobsets" and each.namespace == life.runs.namespace
        ]
        assert len(created) == life.seen[max(life.seen, key=STEPS.index)].attempt
    assert len(deaths) >= 50
    assert {step for step, _ in deaths} == set(STEPS)
    faults.record(
        "operator killed with SIGKILL before or after a write",
        f"{len(deaths)} points in {time.monotonic() - started:.0f} s",
        "the same end, each event once, one JobSet an attempt, no restart spent",
    )
