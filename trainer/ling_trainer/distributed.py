"""How the processes of a run find each other, and what they say when one does not come."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from ling_trainer.ends import Ending, EndRun, ExitCode, end_run
from ling_trainer.environment import NUM_PROCESSES, Group

_JAX_MARGIN_SECONDS = 60
_PROBE_SECONDS = 2.0
_POLL_SECONDS = 1.0
_COORDINATOR_MARGIN_SECONDS = 5
_TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


def initialize(
    group: Group, *, bind_ip: str, start_timeout: int, on_timeout: Callable[[Ending], object]
) -> None:
    """Wait until every process of the group has arrived; call it before anything of JAX.

    Args:
      group: this process and its peers.
      bind_ip: where process 0's coordination service listens; "" is all addresses.
      start_timeout: seconds.
      on_timeout: called in a thread when the group is not complete after start_timeout; it has to
        end the process, since JAX itself would abort it from C++ later on.

    Raises:
      EndRun: the coordination service cannot be started or reached (exit code 42).
    """
    # The preemption notifier would replace our SIGTERM handler without a word.
    jax.config.update("jax_enable_preemption_service", False)
    if group.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    arrived = threading.Event()
    threading.Thread(
        target=_watch, args=(group, start_timeout, arrived, on_timeout), daemon=True
    ).start()
    host = f"[{bind_ip}]" if ":" in bind_ip else bind_ip
    try:
        jax.distributed.initialize(
            coordinator_address=group.coordinator,
            num_processes=group.num_processes,
            process_id=group.process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{host}:{group.coordinator_port}" if host else None,
            initialization_timeout=start_timeout + _JAX_MARGIN_SECONDS,
        )
    except RuntimeError as error:
        message = f"process {group.process_id} cannot join {group.coordinator}: {error}"
        raise EndRun(_restart(message)) from error
    finally:
        arrived.set()


@contextlib.contextmanager
def peers_alive(doing: str) -> Iterator[None]:
    """Turn the failure of a collective into exit code 42.

    A peer that is gone shows as gloo's ValueError on CPUs and as a runtime error elsewhere, so
    only what is compiled already may run here: no ValueError of ours is then mistaken for one.

    Raises:
      EndRun: in place of either error, where there are peers.
    """
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):
            raise
        cause = str(error).strip().split("\n", 1)[0]
        message = f"{doing}: a collective failed, most likely for a lost peer: {cause}"
        raise end_run(ExitCode.RESTART, "LostPeer", message) from error


def seen_processes(port: int) -> int | None:
    """Count the connections to this machine's coordination service; None where it is unknown.

    Every process holds one, process 0 included. Linux only.
    """
    tables = [path for path in _TCP_TABLES if path.exists()]
    if not tables:
        return None
    return sum(
        (local_port, state) == (port, _ESTABLISHED)
        for table in tables
        for local_port, state in _sockets(table)
    )


def _watch(
    group: Group,
    start_timeout: int,
    arrived: threading.Event,
    on_timeout: Callable[[Ending], object],
) -> None:
    """Call on_timeout unless the group is complete in time.

    Process 0 waits a little longer and keeps the largest number it saw: peers whose own time is
    up first leave, and would not be counted at the end.
    """
    if group.process_id:
        if not arrived.wait(start_timeout):
            on_timeout(_incomplete(group, start_timeout, seen=None))
        return
    deadline = time.monotonic() + start_timeout + _COORDINATOR_MARGIN_SECONDS
    seen = seen_processes(group.coordinator_port)
    while not arrived.wait(_POLL_SECONDS):
        if time.monotonic() > deadline:
            on_timeout(_incomplete(group, start_timeout, seen=seen))
            return
        if seen is not None:
            seen = max(seen, seen_processes(group.coordinator_port) or 0)


def _incomplete(group: Group, start_timeout: int, *, seen: int | None) -> Ending:
    """Say who is missing, as far as this process can know; `seen` is process 0's count."""
    expected, within = group.num_processes, f"within distributed.start_timeout={start_timeout} s"
    if group.process_id == 0:
        found = "an unknown number" if seen is None else str(seen)
    elif _answers(group.coordinator):
        found = f"2 or more (process {group.process_id} and the coordinator)"
    else:
        found = f"1 (process {group.process_id}; {group.coordinator} does not answer)"
    return _restart(
        f"expected {expected} processes, seen {found} {within}; see why the others do not start, "
        f"or correct {NUM_PROCESSES}"
    )


def _restart(message: str) -> Ending:
    return Ending(code=ExitCode.RESTART, reason="DistributedStartFailed", message=message)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _sockets(table: Path) -> Iterator[tuple[int, str]]:
    """Yield (local port, state) of each line of /proc/net/tcp."""
    for line in table.read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        yield int(local.rpartition(":")[2], 16), state
