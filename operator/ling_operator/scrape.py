"""GET a trainer's /metrics and read its health from the page."""

import asyncio
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Self

import aiohttp

from ling_operator.verdict import HealthSample
from ling_trainer import health_metrics as series

TIMEOUT_SECONDS = 3.0
MAX_PAGE_BYTES = 256 * 1024
MAX_AT_ONCE = 256
_LARGEST_COUNT = 2**53  # beyond it a float is no exact integer
_TELL_NONFINITE = (
    series.IS_NAN, series.IS_INF, series.GRAD_IS_NONFINITE, series.LOSS, series.LM_LOSS,
    series.RAW_GRAD_NORM, series.CONSECUTIVE_MAX,
)  # fmt: skip
_HEADERS = {"Accept": "text/plain; version=0.0.4", "Accept-Encoding": "identity"}
_READ = frozenset(
    metric.name
    for metric in (
        series.STEP, series.TARGET_STEPS, series.LOSS, series.LM_LOSS, series.RAW_GRAD_NORM,
        series.NUM_ZEROS, series.NUM_GRAD_ELEMENTS, series.TOTAL_WEIGHTS, series.IS_NAN,
        series.IS_INF, series.GRAD_IS_NONFINITE, series.NONFINITE_STEPS, series.CONSECUTIVE_MAX,
        series.LAST_FINITE_STEP, series.LAST_NONFINITE_STEP, series.LAST_FINITE_CHECKPOINT,
        series.LAST_STEP_TIMESTAMP, series.TOKENS_PER_SECOND, series.HEARTBEAT, series.RUN_INFO,
    )
)  # fmt: skip
# Blanks may stand between any two tokens; a page in OpenMetrics, for which nobody asked, has
# timestamps with fractions, and exemplars.
_NAME = re.compile(rf"[ \t]*({series.PREFIX}\w*)", re.ASCII)
_LABEL = re.compile(
    r'[ \t]*([a-zA-Z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,[ \t]*|$)', re.ASCII
)
_VALUE = re.compile(
    r"[ \t]+([-+.0-9a-zA-Z]+)(?:[ \t]+-?[0-9]+(?:\.[0-9]+)?)?[ \t]*(?:#.*)?", re.ASCII
)
_LABELS = re.compile(r'[ \t]*\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
_ESCAPED = re.compile(r"\\(.)")


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


class ScrapeSession:
    """The connections that all scrapes share, and how many there may be at once.

    A scrape's time counts from when it has its place: many targets that do not answer make the
    others wait, but do not make them fail.
    """

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(MAX_AT_ONCE)
        self.http = _client(aiohttp.TCPConnector(limit=0))
        # Of hosts that are read once a minute thousands of idle connections would be kept.
        self.http_once = _client(aiohttp.TCPConnector(limit=0, force_close=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.http_once.close()


def _client(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        headers=_HEADERS,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def scrape(
    session: ScrapeSession, target: ScrapeTarget, *, again_soon: bool = True
) -> HealthSample | ScrapeFailure:
    """Read one page: at most 3 s, at most 256 KiB, and only if it is the asked pod's.

    Args:
      session: the connections.
      target: the page.
      again_soon: keep the connection for the next read.
    """
    http = session.http if again_soon else session.http_once
    try:
        async with (
            session.places,
            asyncio.timeout(TIMEOUT_SECONDS),
            http.get(target.url, allow_redirects=False) as answer,
        ):
            if answer.status != HTTPStatus.OK:
                return _failure("BadStatus", target, f"answered HTTP {answer.status}")
            page = await _read(answer)
    except TimeoutError:
        return _failure("Timeout", target, f"did not answer within {TIMEOUT_SECONDS:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # ValueError: aiohttp refuses some headers and addresses with one.
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
        for name, labels, value in _lines(page):
            if name == series.RUN_INFO.name:
                page_pod_uid = _parse_labels(labels).get("pod_uid") or None
            elif name == series.NONFINITE_STEPS.name:
                found = _parse_labels(labels)
                key = found.get("kind", ""), found.get("signal", "")
                nonfinite[key] = nonfinite.get(key, 0) + (_count(value) or 0)
            else:
                values[name] = value
    except ValueError as error:
        return _failure("NotMetrics", target, f"answered no Prometheus text: {error}")
    if page_pod_uid is None and target.host_network:
        return _failure("UnknownPod", target, "does not say which pod it is, on a shared address")
    if page_pod_uid not in {None, target.pod_uid}:
        return _failure("OtherPod", target, f"is the page of pod {page_pod_uid}")
    return _sample(values, nonfinite, page_pod_uid, target, now)


def _lines(page: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of the series that decisions read.

    Ours, because a general parser of the format takes ten times as long, most of it for lines
    that nobody reads.

    Raises:
      ValueError: such a line is not in the format.
    """
    for line in page.split("\n"):
        name = _NAME.match(line)
        if name is None or name[1] not in _READ:
            continue
        labels = _LABELS.match(line, name.end())
        value = _VALUE.fullmatch(line, labels.end() if labels else name.end())
        if value is None:
            raise ValueError(f"{line[:200]!r} is no sample")
        yield name[1], labels[1] if labels else "", float(value[1])


def _parse_labels(text: str) -> dict[str, str]:
    """Read the labels between two braces.

    Raises:
      ValueError: they are not in the format.
    """
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError(f"{text[:200]!r} are no labels")
        labels[label[1]] = _ESCAPED.sub(lambda c: "\n" if c[1] == "n" else c[1], label[2])
        at = label.end()
    return labels


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
