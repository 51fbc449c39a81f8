"""The process `ling-operator`: flags, tasks, signals. Any task that ends ends the process."""

import argparse
import asyncio
import contextlib
import logging
import re
import resource
import signal
import socket
import sys
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ling_operator.caches import Caches
from ling_operator.cluster import Cluster
from ling_operator.connection import Connection, NoClusterError, discover
from ling_operator.controller import Controller
from ling_operator.lease import RETRY_SECONDS, LeaderLease
from ling_operator.logs import log_json
from ling_operator.reflector import Key
from ling_operator.rest import RestClient
from ling_operator.scrape import ScrapeSession
from ling_operator.telemetry import Telemetry
from ling_operator.workqueue import WorkQueue

STOP_SECONDS = 10.0
LEASE_NAME = "ling-operator"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_log = logging.getLogger("ling_operator.app")  # also when run as __main__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator until SIGTERM (code 0), a dead task (1) or a wrong setting (2)."""
    options = _parse(arguments)
    log_json(level=options.log_level)
    _allow_connections()
    try:
        connection = discover(options.kubeconfig)
    except NoClusterError as error:
        _log.error("no cluster", extra={"error": str(error)})
        sys.exit(2)
    try:
        code = asyncio.run(operate(options, connection))
    except OSError as error:
        _log.critical("cannot listen", extra={"error": str(error)})
        code = 1
    sys.exit(code)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ling-operator", description="Runs TrainingRuns as JobSets and halts diverged ones."
    )
    parser.add_argument("--kubeconfig", help="default: KUBECONFIG, ~/.kube/config, in-cluster")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        dest="namespaces",
        type=_namespace,
        metavar="NAME",
        help="watch this namespace only; repeat it for several; default: all",
    )
    parser.add_argument(
        "--metrics-bind-address",
        type=_address,
        default=":8080",
        metavar="HOST:PORT",
        help="own /metrics; 0 serves none (default :8080)",
    )
    parser.add_argument(
        "--health-probe-bind-address",
        type=_address,
        default=":8081",
        metavar="HOST:PORT",
        help="/healthz and /readyz; 0 serves none (default :8081)",
    )
    parser.add_argument(
        "--leader-elect",
        action="store_true",
        help="act only while holding the Lease; needed for more than one replica",
    )
    parser.add_argument(
        "--leader-election-namespace",
        default=_own_namespace(),
        metavar="NAMESPACE",
        help="of the Lease; default: the pod's own",
    )
    parser.add_argument(
        "--leader-election-lease",
        default=LEASE_NAME,
        metavar="NAME",
        help="name of the Lease; one for each set of replicas (default %(default)s)",
    )
    parser.add_argument("--workers", type=_positive, default=16, help="runs looked at at once")
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info"
    )
    return parser.parse_args(arguments)


def _allow_connections() -> None:
    """Raise the limit of open files to what the system allows: each run keeps a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        msg = f"{text!r} is no namespace; write --namespace once for each"
        raise argparse.ArgumentTypeError(msg)
    return text


def _address(text: str) -> str:
    _, colon, port = text.rpartition(":")
    if text != "0" and not (colon and port.isdigit() and int(port) < 65536):
        msg = f"{text!r} is no address; write HOST:PORT, :PORT or 0"
        raise argparse.ArgumentTypeError(msg)
    return text


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        msg = f"{text!r} is no positive number"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


async def operate(options: argparse.Namespace, connection: Connection) -> int:
    """Run every task until a signal or the first that ends; return the exit code."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        lease = await _lease(options, connection, stack)
        leading = (lambda: True) if lease is None else (lambda: lease.leading)
        client = await stack.enter_async_context(RestClient(connection, may_write=leading))
        session = await stack.enter_async_context(ScrapeSession())
        queue: WorkQueue[Key] = WorkQueue()
        caches = Caches(client, namespaces=options.namespaces, wake=queue.add)
        telemetry = Telemetry(
            queue,
            caches,
            leading=leading,
            lease_refusal=lambda: lease.refusal if lease is not None else None,
        )
        await telemetry.serve(
            stack,
            metrics=options.metrics_bind_address,
            probes=options.health_probe_bind_address,
        )
        controller = Controller(queue, caches, Cluster(client, caches), telemetry)
        tasks = [_named(r.run(), f"watch {r.name}") for r in caches.reflectors]
        tasks += [_named(lease.run(), "lease")] if lease is not None else []
        _log.info("started", extra={"server": connection.server, "namespaces": options.namespaces})
        # A standby's caches are full when it takes over; everything below waits for the Lease.
        ready = _named(_ready(caches, lease), "first lists and the Lease")
        ended = await _first_end([*tasks, ready], stop)
        if ended is ready:
            telemetry.workers_started()
            _log.info("caches synced")
            tasks += [_named(controller.work(), f"worker {i}") for i in range(options.workers)]
            tasks += [_named(controller.scrape(session), "scraper")]
            tasks += [_named(controller.resync(), "resync")]
            ended = await _first_end(tasks, stop)
        await controller.stop(STOP_SECONDS)
        queue.close()
        for task in [*tasks, ready]:
            task.cancel()
        await asyncio.gather(*tasks, ready, return_exceptions=True)
        if lease is not None:
            await lease.release()
    return _exit_code(ended)


async def _lease(
    options: argparse.Namespace, connection: Connection, stack: AsyncExitStack
) -> LeaderLease | None:
    """Return the Lease to act under, None where this is the only replica."""
    if not options.leader_elect:
        return None
    return LeaderLease(
        await stack.enter_async_context(RestClient(connection, request_seconds=RETRY_SECONDS)),
        namespace=options.leader_election_namespace,
        name=options.leader_election_lease,
        identity=f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
    )


async def _ready(caches: Caches, lease: LeaderLease | None) -> None:
    await caches.synced()
    if lease is not None:
        await lease.acquired.wait()


def _named[T](coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    return asyncio.create_task(coroutine, name=name)


async def _first_end(
    tasks: list[asyncio.Task[None]], stop: asyncio.Event
) -> asyncio.Task[None] | None:
    """Wait for the first task to end and return it; None if a signal came first."""
    signalled = asyncio.create_task(stop.wait(), name="signal")
    done, _ = await asyncio.wait({*tasks, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    return next((task for task in tasks if task in done), None)


def _exit_code(ended: asyncio.Task[None] | None) -> int:
    if ended is None:
        _log.info("stopped by a signal")
        return 0
    error = None if ended.cancelled() else ended.exception()
    _log.critical("a task ended", extra={"task": ended.get_name()}, exc_info=error)
    return 1


if __name__ == "__main__":
    main()
