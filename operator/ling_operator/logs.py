"""Logs as JSON, one event a line."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Renders a record as one JSON object; what was given as `extra` becomes its keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        event |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            event["trace"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def log_json(*, level: str, stream: IO[str] | None = None) -> None:
    """Send every logger's records of this level and above to a stream (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
