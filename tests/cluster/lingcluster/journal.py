"""Reading what the real trainer leaves in its run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def journal(run_directory: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of metrics.jsonl by step, whole lines only; empty before there are any."""
    path = run_directory / "metrics.jsonl"
    if not path.exists():
        return {}
    records = [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return {record["step"]: record for record in records}


def step_time(run_directory: Path, step: int) -> float | None:
    """Return when a step ended, in seconds since the epoch; None before it has."""
    record = journal(run_directory).get(step)
    return record["time"] if record else None


def kept_checkpoints(run_directory: Path) -> list[int]:
    """Return the steps of the checkpoints that are there."""
    folder = run_directory / "checkpoints"
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
