"""How much CPU does it take to scrape a thousand trainers?

A server process answers at 1,000 loopback addresses with the page of the product's own exporter.
This process scrapes all of them as the operator does, and reports its own CPU seconds a round
(user and system; the server's are not in them): over new connections, as for heartbeats, and over
kept ones, as for process 0 of each run. Beside it the same with prometheus_client's parser.

    python benchmarks/scrape_thousand.py > benchmarks/results/DATE-scrape-thousand.json
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from provenance import provenance

from ling_operator.scrape import ScrapeFailure, ScrapeSession, ScrapeTarget, read_page, scrape
from ling_trainer import health_metrics as series

TARGETS = 1000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
RUN = {"run": "ling2-pretrain", "run_namespace": "default"}


def make_page() -> bytes:
    """Return a page with every series of the contract, and the ten of a Python process."""
    registry = CollectorRegistry()
    for metric in series.ALL:
        kind = Counter if metric.kind == series.Kind.COUNTER else Gauge
        name = metric.name.removesuffix("_total")
        made = kind(name, metric.help, [*RUN, *metric.labels], registry=registry)
        values = ["pod-uid" if label == "pod_uid" else "x" for label in metric.labels]
        made.labels(*RUN.values(), *values).inc(1234.5678)
    for index in range(10):
        Gauge(f"python_gc_objects_{index}", "Not ours.", registry=registry).set(index)
    return generate_latest(registry)


class _Server(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(self._answer * data.count(b"\r\n\r\n"))


def serve(pipe: Connection, page: bytes) -> None:
    """Answer on every loopback address; tell the port through the pipe."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        answer = HEAD % len(page) + page
        server = await loop.create_server(lambda: _Server(answer), "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def serving(page: bytes) -> Iterator[list[ScrapeTarget]]:
    """Run the server; yield a target for each of 1,000 addresses."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, page))
    process.start()
    port = ours.recv()
    addresses = [f"127.9.{n // 200}.{n % 200 + 1}" for n in range(TARGETS)]
    try:
        yield [
            ScrapeTarget(ip=ip, port=port, pod_uid="pod-uid", host_network=True)
            for ip in addresses
        ]
    finally:
        process.terminate()
        process.join()


async def scraping(
    targets: list[ScrapeTarget], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Scrape all targets again and again; return (CPU, wall) seconds of each round."""
    found: dict[str, list[tuple[float, float]]] = {"new_connections": [], "kept_connections": []}
    for _ in range(rounds + 1):
        async with ScrapeSession() as session:
            for kind, times in found.items():
                cpu, wall = time.process_time(), time.perf_counter()
                results = await asyncio.gather(*(scrape(session, t) for t in targets))
                times.append((time.process_time() - cpu, time.perf_counter() - wall))
                failures = [r for r in results if isinstance(r, ScrapeFailure)]
                assert not failures, f"{kind}: {len(failures)} failed: {failures[0].message}"
    return {kind: times[1:] for kind, times in found.items()}  # the first warms up


def parsing(parse: Callable[[str], Any], page: str, rounds: int) -> list[float]:
    """Return CPU seconds for parsing a thousand pages, of each round."""
    times: list[float] = []
    for _ in range(rounds + 1):
        began = time.process_time()
        for _ in range(TARGETS):
            parse(page)
        times.append(time.process_time() - began)
    return times[1:]


def summary(times: list[float]) -> dict[str, float]:
    """Return median and extremes."""
    return {
        "median": round(statistics.median(times), 4),
        "least": round(min(times), 4),
        "most": round(max(times), 4),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    page = make_page()
    with serving(page) as targets:
        found = asyncio.run(scraping(targets, rounds))
        text, target, now = page.decode(), targets[0], datetime.now(UTC)
    ours = parsing(lambda p: read_page(p, target, now=now), text, rounds)
    theirs = parsing(lambda p: [*text_string_to_metric_families(p)], text, rounds)
    print(
        json.dumps(
            {
                "question": "CPU seconds to scrape 1,000 trainers once",
                **provenance("aiohttp", "prometheus-client"),
                "targets": TARGETS,
                "rounds": rounds,
                "page_bytes": len(page),
                "page_lines": text.count("\n"),
                "scrape_cpu_seconds": {k: summary([c for c, _ in v]) for k, v in found.items()},
                "scrape_wall_seconds": {k: summary([w for _, w in v]) for k, v in found.items()},
                "parse_cpu_seconds": {
                    "read_page": summary(ours),
                    "prometheus_client": summary(theirs),
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
