"""Mean time to recover: how long a run does not train after a failure. Pure.

What counts is written at api_status.Mttr.
"""

from datetime import timedelta

from ling_operator.api import Mttr, Phase, TrainingRunStatus
from ling_operator.plan import Observed

_DOWN = frozenset({Phase.RESTARTING, Phase.HALTED, Phase.FAILED})
_NO_OUTAGE = frozenset({Phase.SUSPENDED, Phase.COMPLETE, Phase.CANCELLED})


def measure_recovery(observed: Observed, status: TrainingRunStatus) -> TrainingRunStatus:
    """Return the status with the outage begun, ended or dropped; its phase is the new one."""
    before = observed.run.status
    mttr = before.mttr
    restarted = before.attempt == status.attempt and status.restarts > before.restarts
    fell = status.phase in _DOWN and before.phase not in _DOWN
    if status.phase in _NO_OUTAGE:
        mttr = mttr.model_copy(update={"down_since": None, "down_pod_uid": None})
    elif mttr.down_since is None and (restarted or fell):
        # This pass's page may be the new process's already: the one before is what went down.
        seen = before.health.pod_uid if before.attempt == status.attempt else None
        down = seen or status.health.pod_uid
        mttr = mttr.model_copy(update={"down_since": observed.now, "down_pod_uid": down})
    return status.model_copy(update={"mttr": _recovered(mttr, status)})


def _recovered(mttr: Mttr, status: TrainingRunStatus) -> Mttr:
    """End the outage if another process than the one it began with has finished a step."""
    health, since = status.health, mttr.down_since
    back = health.progress_time if health.stepping else None
    if back is None or since is None or health.pod_uid in {None, mttr.down_pod_uid}:
        return mttr
    seconds = round(max(back - since, timedelta()).total_seconds())
    recoveries, total = mttr.recoveries + 1, mttr.total_seconds + seconds
    return Mttr(
        recoveries=recoveries,
        total_seconds=total,
        mean_seconds=round(total / recoveries),
        last_seconds=seconds,
    )
