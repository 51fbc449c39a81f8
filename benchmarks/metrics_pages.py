"""One process that answers /metrics for every fake host, by the address that was asked.

All of 127.0.0.0/8 is this machine's, so a server on every address answers for pods whose addresses
lie in it. The page is the real exporter's whole one, of a run that makes a step a second; its
pod_uid is empty, as a foreign trainer's. /diverge makes an address's page NaN from now on.

    python benchmarks/metrics_pages.py PORT
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from ling_trainer import health_metrics as series
from ling_trainer.exporter import Exporter, Identity, Snapshot
from ling_trainer.progress import Progress, fold, resumed_at
from ling_trainer.report import NonFiniteStep

TARGET_STEPS = 1_000_000
_OF = Identity(
    run="run",
    run_namespace="bench",
    pod_uid="",
    process=0,
    processes=4,
    attempt=1,
    preset="ling2",
    version="0",
)


def page_of(progress: Progress) -> bytes:
    """Return the page of process 0."""
    bad = progress.nonfinite_row > 0
    log = {str(metric.log_key): 1.0 for metric in series.LOGGED}
    log |= {str(series.LOSS.log_key): math.nan if bad else 2.5}
    log |= {str(m.log_key): 0.0 for m in (series.IS_INF, series.GRAD_IS_NONFINITE)}
    log |= {str(series.IS_NAN.log_key): float(bad)}
    exporter = Exporter(_OF)
    exporter.publish(
        Snapshot(
            heartbeat=time.time(),
            progress=progress,
            target_steps=TARGET_STEPS,
            checkpoint_step=0,
            checkpoint_time=time.time(),
            checkpoint_period=1000,
            log=log,
        )
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    return generate_latest(registry)


class Pages:
    """The pages of all addresses: one that all healthy ones share, and those that diverged."""

    def __init__(self) -> None:
        self._began = time.time()
        self._healthy = (0, b"")
        self._diverged: dict[str, bytes] = {}

    def answer(self, path: str, address: str) -> bytes:
        """Return the body for a path at an address."""
        if path == "/diverge":
            kind, signal = series.NonFinite.NAN, series.Signal.NON_FINITE_LOSS
            bad = NonFiniteStep(kind=kind, signal=signal, value=math.nan)
            step = self._step() + 1
            progress = fold(resumed_at(step - 1), step=step, tokens=1, bad=bad, now=time.time())
            self._diverged[address] = page_of(progress)
            return b"NaN from now on"
        if path == "/heal":
            self._diverged.pop(address, None)
            return b"finite again"
        return self._diverged.get(address) or self._shared()

    def _step(self) -> int:
        return max(1, int(time.time() - self._began))

    def _shared(self) -> bytes:
        step = self._step()
        if self._healthy[0] != step:
            progress = fold(resumed_at(step - 1), step=step, tokens=1, bad=None, now=time.time())
            self._healthy = step, page_of(progress)
        return self._healthy[1]


class Connection(asyncio.Protocol):
    """One kept-alive connection; requests are one packet each, as those of a scraper are."""

    def __init__(self, answer: Callable[[str, str], bytes]) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note which address was asked."""
        self._transport = cast("asyncio.Transport", transport)
        self._address = str(transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        """Answer a request."""
        path = data.split(b" ", 2)[1].decode()
        body = self._answer(path, self._address)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(port: int) -> None:
    """Answer on every address until killed."""
    pages = Pages()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(pages.answer), "0.0.0.0", port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
