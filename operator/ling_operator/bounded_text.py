"""Text of processes made fit for an object: printable, valid UTF-8, bounded. Pure."""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CUT = " ... "


def printable(text: str) -> str:
    """Return text without terminal escapes, control characters and lone surrogates.

    Tabs and line ends stay. What cannot be shown would be stored as an escape that no reader of
    `kubectl get -o yaml` can make sense of.
    """
    if text.isprintable():  # as nearly all is, in every pass over every run
        return text
    text = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def clip(text: str, limit: int) -> str:
    """Return printable text of at most `limit` bytes of UTF-8: its beginning and its end.

    The beginning of a message says what it is about, the end of a trace what was wrong.
    """
    text = printable(text.replace("\r", "\n")).strip()
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    head = (limit - len(_CUT)) // 2
    tail = limit - len(_CUT) - head
    begin = encoded[:head].decode(errors="ignore")
    return begin + _CUT + encoded[-tail:].decode(errors="ignore")


def last_lines(text: str, *, lines: int, limit: int) -> tuple[str, ...]:
    """Return the last lines of an output that are not blank, of `limit` bytes together at most.

    A line that has no place any more is cut, and those before it are left out.
    """
    kept: list[str] = []
    for line in reversed(text.splitlines()):  # a progress bar's carriage return ends a line too
        line = printable(line).rstrip()
        if not line:
            continue
        size = len(line.encode()) + 1
        if size > limit:
            if limit > 2 * len(_CUT):
                kept.append(clip(line, limit - 1))
            break
        kept.append(line)
        limit -= size
        if len(kept) == lines:
            break
    return tuple(reversed(kept))
