"""Fault injection for drills: what is spoilt at which step."""

import os
import signal
import time
from typing import NoReturn

from ling_trainer.config import FaultConfig
from ling_trainer.step import Poison

_POISONS = {
    "nan_loss": Poison.NAN_LOSS,
    "inf_loss": Poison.INF_LOSS,
    "nan_gradient": Poison.NAN_GRADIENT,
}


def is_hit(fault: FaultConfig, step: int) -> bool:
    """Tell whether the fault falls on a step; the first step of a run is 1."""
    return fault.enabled and 0 <= step - fault.fault_step < fault.fault_count


def poison_of(fault: FaultConfig, step: int) -> Poison:
    """Return what the compiled step has to spoil."""
    return _POISONS.get(fault.fault_kind, Poison.NONE) if is_hit(fault, step) else Poison.NONE


def strike(fault: FaultConfig, step: int) -> None:
    """Do what a fault does to the process itself, before the step."""
    if not is_hit(fault, step):
        return
    if fault.fault_kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.fault_kind == "hang":
        _hang()


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)
