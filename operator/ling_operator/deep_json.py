"""JSON as deep as the API server takes it: ten times deeper than the standard parser goes.

spec.run may hold whatever its user wrote; one object that cannot be parsed would keep all others
from being listed.
"""

import json
import sys
from json import decoder, scanner
from typing import Any

_DEPTH = 40_000  # the API server stops at 10,000 levels; each takes two or three calls here


def loads(text: str | bytes) -> object:
    """Parse JSON.

    Raises:
      ValueError: it is none, or deeper than any API server's.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _loads_slowly(text.decode() if isinstance(text, bytes) else text)


def _loads_slowly(text: str) -> object:
    """Parse with the parser that is written in Python: its depth is not bounded by C's stack."""
    slow: Any = json.JSONDecoder()
    parts: Any = decoder
    scanners: Any = scanner  # the names used here are in no documentation
    slow.parse_object, slow.parse_array = parts.JSONObject, parts.JSONArray
    slow.scan_once = scanners.py_make_scanner(slow)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + _DEPTH)
    try:
        return slow.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        sys.setrecursionlimit(before)
