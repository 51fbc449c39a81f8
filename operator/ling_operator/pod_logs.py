"""Reading pods' output: its end, quickly or not at all, as evidence; all of it, as it grows."""

import asyncio
import time
from http import HTTPStatus
from pathlib import Path

from ling_operator.bounded_text import clip, last_lines
from ling_operator.evidence import LOG_BYTES, LOG_LINES
from ling_operator.plan import LogSource, LogTail
from ling_operator.rest import ApiError, RestClient

TAIL_SECONDS = 3.0
"""A halt waits this long for a log."""
_HURRIED_SECONDS = 0.5
_HURRY_SECONDS = 60.0
_READ_BYTES = 65536
# A runtime cuts lines at 16 KiB. A lower limit than all of them would be kept by leaving out the
# end, which is what matters.
_LINE_BYTES = 16_384
_PROBLEM_BYTES = 500


class LogReader:
    """Reads the end of pods' output; an answer that takes long is done without.

    After one that did, others get half a second for a minute: where nodes do not answer, many
    runs may have to be stopped at once.
    """

    def __init__(self, client: RestClient) -> None:
        self._client = client
        self._hurry_until = float("-inf")

    async def tail(self, namespace: str, source: LogSource) -> LogTail:
        """Return the last lines of a container's output, or why there are none."""
        hurried = time.monotonic() < self._hurry_until
        seconds = _HURRIED_SECONDS if hurried else TAIL_SECONDS
        try:
            async with asyncio.timeout(seconds):
                text = await self._client.text(
                    log_path(namespace, source.pod),
                    container=source.container,
                    tailLines=str(LOG_LINES),
                    limitBytes=str(LOG_LINES * _LINE_BYTES),
                )
        except TimeoutError:
            self._hurry_until = time.monotonic() + _HURRY_SECONDS
            return LogTail(source.uid, problem=f"no answer within {seconds:g} s")
        except ApiError as error:
            return LogTail(source.uid, problem=_problem(error))
        return _tail(source, text)


def tail_of_file(source: LogSource, path: Path | None) -> LogTail:
    """Return the last lines of a file, or why there are none."""
    if path is None:
        return LogTail(source.uid, problem=f"{source.pod} has no log here")
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, 2) - _READ_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return LogTail(source.uid, problem=str(error))
    return _tail(source, text)


def log_path(namespace: str, pod: str) -> str:
    """Return the path of a pod's log."""
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/log"


def _tail(source: LogSource, text: str) -> LogTail:
    lines = last_lines(text, lines=LOG_LINES, limit=LOG_BYTES)
    return LogTail(source.uid, lines, None if lines else "it printed nothing")


def _problem(error: ApiError) -> str:
    """Say what the API server said, and what to grant where it does not allow it."""
    hint = "; grant get on pods/log" if error.status == HTTPStatus.FORBIDDEN else ""
    return clip(error.message, _PROBLEM_BYTES) + hint
