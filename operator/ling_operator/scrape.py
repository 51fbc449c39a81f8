"""GET a trainer's /metrics and read its health from the page."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from ling_operator.verdict import HealthSample
from ling_trainer import health_metrics as series

TIMEOUT_SECONDS = 3.0
MAX_PAGE_BYTES = 256 * 1024
_LARGEST_COUNT = 2**53  # beyond it a float is no exact integer
_TELL_NONFINITE = (
    series.IS_NAN, series.IS_INF, series.GRAD_IS_NONFINITE, series.LOSS, series.LM_LOSS,
    series.RAW_GRAD_NORM, series.CONSECUTIVE_MAX,
)  # fmt: skip
_HEADERS = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """Where global process 0 of a run answers.

    Attributes:
      host_network: other runs may answer on the same address, so the page must say whose it is.
    """

    ip: str
    port: int
    pod_uid: str
    host_network: bool

    @property
    def url(self) -> str:
        """Address of the page."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.port}/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeFailure:
    """Why there is no sample. Never evidence of divergence.

    Attributes:
      reason: one CamelCase word, for the metric's label.
      message: a sentence, for a condition.
    """

    reason: str
    message: str


def scrape_session() -> aiohttp.ClientSession:
    """Open the connection pool that all scrapes share."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=256),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        headers=_HEADERS,
        auto_decompress=False,
    )


async def scrape(
    session: aiohttp.ClientSession, target: ScrapeTarget
) -> HealthSample | ScrapeFailure:
    """Read one page: at most 3 s, at most 256 KiB, and only if it is the asked pod's."""
    try:
        async with session.get(target.url, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                return _failure("BadStatus", target, f"answered HTTP {answer.status}")
            page = await _read(answer)
    except TimeoutError:
        return _failure("Timeout", target, f"did not answer within {TIMEOUT_SECONDS:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return _failure("Unreachable", target, f"cannot be read: {error}")
    if len(page) > MAX_PAGE_BYTES:
        return _failure("TooLarge", target, f"answered more than {MAX_PAGE_BYTES} bytes")
    return read_page(page.decode("utf-8", "replace"), target, now=datetime.now(UTC))


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body, but stop after one byte too many."""
    page = bytearray()
    async for chunk in answer.content.iter_any():
        page += chunk
        if len(page) > MAX_PAGE_BYTES:
            break
    return bytes(page)


def read_page(page: str, target: ScrapeTarget, *, now: datetime) -> HealthSample | ScrapeFailure:
    """Take a sample from a page in Prometheus' text format.

    Levels that are missing, or no number of their kind, are None: a foreign trainer may export
    only some. A page of another pod is refused: on a host network a port may have changed hands.
    """
    values: dict[str, float] = {}
    nonfinite: dict[tuple[str, str], int] = {}
    page_pod_uid: str | None = None
    try:
        for sample in _samples(page):
            if sample.name == series.RUN_INFO.name:
                page_pod_uid = sample.labels.get("pod_uid") or None
            elif sample.name == series.NONFINITE_STEPS.name:
                key = sample.labels.get("kind", ""), sample.labels.get("signal", "")
                nonfinite[key] = nonfinite.get(key, 0) + (_count(sample.value) or 0)
            else:
                values[sample.name] = sample.value
    except (ValueError, IndexError, KeyError) as error:
        return _failure("NotMetrics", target, f"answered no Prometheus text: {error}")
    if page_pod_uid is None and target.host_network:
        return _failure("UnknownPod", target, "does not say which pod it is, on a shared address")
    if page_pod_uid not in {None, target.pod_uid}:
        return _failure("OtherPod", target, f"is the page of pod {page_pod_uid}")
    return _sample(values, nonfinite, page_pod_uid, target, now)


def _samples(page: str) -> Iterable[Any]:
    """Yield the samples of our series; the parser sees no other line, which halves its cost."""
    ours = "\n".join(line for line in page.splitlines() if line.startswith(series.PREFIX))
    for family in text_string_to_metric_families(ours + "\n"):
        yield from family.samples


def _sample(
    values: dict[str, float],
    nonfinite: dict[tuple[str, str], int],
    page_pod_uid: str | None,
    target: ScrapeTarget,
    now: datetime,
) -> HealthSample:
    def level(metric: series.Metric) -> float | None:
        return values.get(metric.name)

    def count(metric: series.Metric) -> int | None:
        return _count(level(metric))

    return HealthSample(
        time=now,
        pod_uid=target.pod_uid,
        page_pod_uid=page_pod_uid,
        step=count(series.STEP),
        target_steps=count(series.TARGET_STEPS),
        loss=level(series.LOSS),
        lm_loss=level(series.LM_LOSS),
        raw_grad_norm=level(series.RAW_GRAD_NORM),
        num_zeros=level(series.NUM_ZEROS),
        num_grad_elements=level(series.NUM_GRAD_ELEMENTS),
        total_weights=level(series.TOTAL_WEIGHTS),
        is_nan=level(series.IS_NAN) == 1,
        is_inf=level(series.IS_INF) == 1,
        grad_is_nonfinite=level(series.GRAD_IS_NONFINITE) == 1,
        shows_nonfinite=bool(nonfinite) or any(level(s) is not None for s in _TELL_NONFINITE),
        nonfinite_steps=tuple(sorted(nonfinite.items())),
        consecutive_max=count(series.CONSECUTIVE_MAX),
        last_finite_step=count(series.LAST_FINITE_STEP),
        last_nonfinite_step=count(series.LAST_NONFINITE_STEP),
        last_finite_checkpoint=count(series.LAST_FINITE_CHECKPOINT),
        last_step_time=_time(level(series.LAST_STEP_TIMESTAMP)),
        tokens_per_second=level(series.TOKENS_PER_SECOND),
        heartbeat=_time(level(series.HEARTBEAT)),
    )


def _count(value: float | None) -> int | None:
    """Return a count or step number; None for NaN, infinities, negatives and absurd ones."""
    if value is None or not 0 <= value <= _LARGEST_COUNT:  # false for NaN too
        return None
    return int(value)


def _time(seconds: float | None) -> datetime | None:
    """Return a moment; None for 0, which means never, and for what is no moment."""
    if seconds is None or not math.isfinite(seconds) or seconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _failure(reason: str, target: ScrapeTarget, what: str) -> ScrapeFailure:
    return ScrapeFailure(reason=reason, message=f"{target.url} {what}")
