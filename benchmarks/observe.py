"""What a process costs, and what its histograms say, between two looks; and the table's row."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Usage:
    """A process's CPU time and memory so far."""

    cpu_seconds: float
    rss_mb: float
    rss_peak_mb: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """Read it from /proc."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        status = Path(f"/proc/{pid}/status").read_text()
        return cls(
            cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
            rss_mb=_kib(status, "VmRSS") / 1024,
            rss_peak_mb=_kib(status, "VmHWM") / 1024,
        )


def _kib(status: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that a share q of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def series(page: str, name: str, **labels: str) -> list[float]:
    """Return the values of a page's samples of a name whose labels contain some."""
    found: list[float] = []
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] != name:
            continue
        if all(f'{key}="{text}"' in head for key, text in labels.items()):
            found.append(float(value))
    return found


def histogram_quantiles(before: str, after: str, name: str) -> dict[str, float | str]:
    """Return p50 and p99 of what a histogram counted between two pages.

    Interpolated within the bucket, as PromQL's histogram_quantile does.
    """
    counts = _buckets(after, name)
    earlier = _buckets(before, name)
    buckets = [(bound, count - earlier.get(bound, 0)) for bound, count in sorted(counts.items())]
    if not buckets or not buckets[-1][1]:
        return {}
    return {f"p{round(100 * q)}": round(_at(buckets, q), 4) for q in (0.5, 0.99)}


def _buckets(page: str, name: str) -> dict[float, float]:
    pattern = rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$'
    return {float(le): float(n) for le, n in re.findall(pattern, page, re.MULTILINE)}


def _at(buckets: Sequence[tuple[float, float]], q: float) -> float:
    wanted, low, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            inside = count - below
            return (
                low if bound == float("inf") else low + (bound - low) * (wanted - below) / inside
            )
        low, below = bound, count
    return low


def row(result: dict[str, Any]) -> str:
    """Return the sentence of the table in README.md."""
    ours, load = result["ling-operator"], result["load"]
    latency, wait = ours["nan_to_deleting_seconds"], ours["queue_wait_seconds"]
    text = (
        f"{load['runs']} runs of {load['hosts']} hosts and {load['wide_runs']} of "
        f"{load['wide_hosts']}, "
        f"{load['pods']} pods: {ours['cpu_cores']:.2f} cores, {ours['rss_peak_mb']} MB, "
        f"{ours['api_writes_per_second']} writes/s; a run waits {wait['p50']} s for its pass "
        f"(p99 {wait['p99']} s) of {ours['reconcile_seconds']['p50']} s "
        f"(p99 {ours['reconcile_seconds']['p99']} s); from a NaN to pods being deleted "
        f"{latency['p50']} s (p99 {latency['p99']} s) at "
        f"{result['scrape_interval_seconds']} s between scrapes"
    )
    if kopf := result.get("kopf"):
        text += (
            f". A skeleton on kopf: {kopf['cpu_cores']:.2f} cores, {kopf['rss_peak_mb']} MB, "
            f"{kopf['api_writes_per_second']} writes/s, "
            f"{kopf['nan_to_deleting_seconds']['p50']} s "
            f"(p99 {kopf['nan_to_deleting_seconds']['p99']} s)"
        )
    return text
