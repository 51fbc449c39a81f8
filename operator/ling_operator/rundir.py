"""A local run's directory: who holds it, and the object and JobSet that are kept in it."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self, cast

type JsonObject = dict[str, Any]

OBJECT = "trainingrun.json"
JOBSET = "jobset.json"


class HeldError(Exception):
    """Another process runs in this directory."""


class RunDirectory:
    """The directory of one local run, ours alone while entered.

    The lock belongs to the open file, and trainers inherit it: even if this process is killed,
    nobody else enters before its last trainer has checkpointed and gone.

    Attributes:
      path: {base_output_directory}/{run_name}.
      lock: descriptor for trainers to inherit.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = -1

    def __enter__(self) -> Self:
        """Create and lock the directory.

        Raises:
          HeldError: somebody has it; the message names the process.
          OSError: it cannot be made.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            msg = (
                f"{self.path} is in use by process {holder} or its trainers; "
                "wait for it, stop it, or choose another run_name"
            )
            raise HeldError(msg) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self.lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        """Let go; trainers that still run keep it."""
        os.close(self.lock)
        self.lock = -1

    @property
    def logs(self) -> Path:
        """Where the trainers' output goes."""
        return self.path / "logs"

    def load(self, name: str) -> JsonObject | None:
        """Read one of the kept objects; None before it was first saved."""
        try:
            return cast("JsonObject", json.loads((self.path / name).read_text("utf-8")))
        except FileNotFoundError:
            return None

    def save(self, name: str, content: JsonObject | None) -> None:
        """Replace one of the kept objects, whole or not at all; None removes it."""
        path = self.path / name
        if content is None:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")
        temporary.replace(path)
