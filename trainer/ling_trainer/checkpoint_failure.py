"""Why a checkpoint could not be written or read: what a restart may cure, and what it cannot."""

import re

import jax

from ling_trainer.ends import EndRun, ExitCode, end_run

_TRANSIENT = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|CANCELLED")
_COLLECTIVE = re.compile(r"\bgloo\b|connection (closed|reset) by peer|barrier", re.IGNORECASE)
_PERMANENT_OS_ERRORS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_LEAF_IN_MESSAGE = re.compile(r"""['"]path['"]: ?['"]([^/'"][^'"]*)/['"]""")

OLDER = "delete that checkpoint's directory to restore an older one"
"""What to do about a checkpoint that cannot be read."""


def unusable(message: str) -> EndRun:
    """Build the end of a run whose checkpoint is wrong for good (exit code 4)."""
    return end_run(ExitCode.CHECKPOINT, "CheckpointUnusable", message)


def failure(error: Exception, where: str) -> EndRun:
    """Tell what a restart may cure, storage or a lost peer, from data that is wrong for good.

    Args:
      error: what Orbax raised.
      where: the checkpoint, for the message.

    Returns: The end of the run, with exit code 42 or 4.
    """
    text = str(error)
    if jax.process_count() > 1 and _is_collective(error):
        message = f"{where}: a collective failed, most likely for a lost peer: {_short(text)}"
        return end_run(ExitCode.RESTART, "LostPeer", message)
    transient = isinstance(error, OSError) and not isinstance(error, _PERMANENT_OS_ERRORS)
    if transient or _TRANSIENT.search(text):
        return end_run(ExitCode.RESTART, "StorageFailed", f"{where}: {_short(text)}")
    leaves = _LEAF_IN_MESSAGE.findall(text) + _LEAF_IN_MESSAGE.findall(str(error.__cause__ or ""))
    leaf = f" leaf {leaves[0]}:" if leaves else ""
    return unusable(f"{where}:{leaf} {_short(text)}; {OLDER}")


def _is_collective(error: BaseException | None) -> bool:
    """Tell whether processes that speak with each other failed, and not what they read or write.

    Saving and restoring exchange data and meet at barriers; Orbax passes those errors on, as they
    are or as the cause of its own.
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or _COLLECTIVE.search(str(error)):
            return True
        error = error.__cause__
    return False


def _short(text: str) -> str:
    """Keep the first line: TensorStore's errors go on with pages of its own settings."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= 300 else f"{line[:300]} ..."
