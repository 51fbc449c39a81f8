"""How a run ends: exit codes, the message left for the operator, and leaving together."""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

KUBERNETES_MESSAGE_PATH = Path("/dev/termination-log")
COORDINATOR_STAYS_SECONDS = 2.0
"""Process 0 hosts the coordination service: a peer that still runs dies of its absence."""
_MESSAGE_BYTES = 2000  # the kubelet keeps 4096, and 12 KiB for all containers of a pod


class ExitCode(IntEnum):
    """Codes the trainer chooses. All but RESTART and STOPPED are final: a restart cannot help.

    Codes it does not choose: 1 is an exception nobody expected, with its traceback; 130 is a
    second Ctrl-C, which leaves without a checkpoint; 134 is JAX's abort when a peer is lost
    outside of a step, 139 the same of a container's process 1, and both mean the same as 42.
    """

    FINISHED = 0
    """Every step is done; so does a finished run that is started again."""
    CONFIGURATION = 2
    """A setting is wrong."""
    DATA = 3
    """A data file is missing, damaged or too small."""
    CHECKPOINT = 4
    """A checkpoint is damaged, or belongs to another model or other data."""
    METRICS_PORT = 5
    """Another process listens on the metrics port."""
    RESTART = 42
    """Start all processes again: a lost peer, a start that timed out, storage that failed."""
    DIVERGED = 90
    """Loss or gradients were not finite for health.non_finite_consecutive_steps steps."""
    STOPPED = 143
    """SIGTERM or Ctrl-C; the last finished step is in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a run ends here.

    Attributes:
      code: exit code of the process: an ExitCode, or one of those it does not choose.
      reason: one CamelCase word; NonFiniteLoss or NonFiniteGradient where the run diverged.
      message: a sentence for people.
      step: last finished step; 0 before the first.
      last_finite_step: last step whose loss and gradients were finite.
      value: nan or inf, where the run diverged.
      signal: NonFiniteLoss or NonFiniteGradient, where the run diverged.
    """

    code: int
    reason: str
    message: str
    step: int = 0
    last_finite_step: int = 0
    value: str = ""
    signal: str = ""

    def to_json(self, process: int) -> str:
        """Write the termination message: a JSON object of strings, short enough to be kept."""
        fields = {
            "reason": self.reason,
            "step": str(self.step),
            "lastFiniteStep": str(self.last_finite_step),
            "value": self.value,
            "signal": self.signal,
            "process": str(process),
        }
        room = _MESSAGE_BYTES - len(json.dumps(fields))
        return json.dumps({**fields, "message": self.message[: max(room // 2, 0)]})


class EndRun(Exception):  # noqa: N818 - an ending is not always an error
    """Raised where a run cannot go on; carries the Ending."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.message)
        self.ending = ending


def end_run(code: ExitCode, reason: str, message: str) -> EndRun:
    """Build the exception for an end that has no step to report."""
    return EndRun(Ending(code=code, reason=reason, message=message))


def write_termination_message(ending: Ending, *, process: int, path: Path | None) -> None:
    """Leave the ending where the kubelet, or whoever started the process, looks for it.

    Args:
      ending: what to say.
      process: this process's index.
      path: the file; None is Kubernetes' own, where it exists. A file that cannot be written is
        passed over: the exit code still says what happened.
    """
    if path is None:
        if not KUBERNETES_MESSAGE_PATH.exists():
            return
        path = KUBERNETES_MESSAGE_PATH
    with contextlib.suppress(OSError):
        path.write_text(ending.to_json(process))


def leave(code: int, *, process: int, num_processes: int) -> NoReturn:
    """End the process at once, process 0 of several some seconds after the others.

    Not `sys.exit`: JAX's shutdown waits there for peers that may be gone, up to five minutes, and
    then aborts with another code.
    """
    if process == 0 and num_processes > 1:
        time.sleep(COORDINATOR_STAYS_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
