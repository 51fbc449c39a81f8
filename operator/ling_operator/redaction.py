"""Objects and texts without the secrets that an environment may hold. Pure.

Over-careful with environment variables, whose names say little; in settings only a whole word
counts, or every tokenizer's path would be hidden.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

REDACTED = "(redacted)"
_ENV_NAME = re.compile(r"token|secret|passw|credential|key|auth", re.IGNORECASE)
_WORD = r"'[^']*'|\"[^\"]*\"|[^\s'\";&|]+"
_IN_COMMAND = re.compile(rf"(?<![\w.-])(?:([\w.-]+=)|(--?[\w.-]+(?:=|\s+)))({_WORD})")
_IN_URL = re.compile(r"(\w://[^\s/:@]*:)([^\s/@]+)(?=@)")
_FLAG = re.compile(r"^(-{0,2}[\w.-]+)=(.+)$", re.DOTALL)
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_SECRET_WORDS = frozenset({
    "token", "secret", "password", "passwd", "credential", "credentials",
    "apikey", "accesskey", "privatekey", "secretkey",
})  # fmt: skip
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SHORTEST_SECRET = 6
_DROPPED = ("managedFields",)


def redact(value: Any) -> tuple[Any, frozenset[str]]:
    """Return a copy of an object without secrets, and the secrets."""
    found: set[str] = set()
    return _clean(value, found), frozenset(s for s in found if len(s) >= _SHORTEST_SECRET)


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return text without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def _clean(value: Any, found: set[str]) -> Any:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return {k: _field(k, v, fields, found) for k, v in fields.items() if k not in _DROPPED}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [
            _clean(_argument(item, before, found), found)
            for before, item in zip([None, *items], items, strict=False)
        ]
    return _in_url(value, found) if isinstance(value, str) else value


def _field(key: str, value: Any, fields: Mapping[str, Any], found: set[str]) -> Any:
    if key == "value" and isinstance(value, str) and isinstance(fields.get("name"), str):
        return _variable(fields["name"], value, found)
    if key == "annotations" and isinstance(value, Mapping):
        notes = cast("Mapping[str, Any]", value)
        # It repeats the whole object, environment and all.
        value = {k: v for k, v in notes.items() if k != _LAST_APPLIED}
    if isinstance(value, str) and value and _says_secret(key):
        found.add(value)
        return REDACTED
    return _clean(value, found)


def _variable(name: str, value: str, found: set[str]) -> str:
    """Hide a variable's value by its name; look into one that holds settings."""
    if _ENV_NAME.search(name):
        found.add(value)
        return REDACTED
    if value.startswith("{"):
        try:
            return json.dumps(_clean(json.loads(value), found))
        except ValueError:
            pass
    return _in_url(value, found)


def _argument(item: Any, before: Any, found: set[str]) -> Any:
    """Hide the value of name=value, of --name and then VALUE, and both in a shell's command."""
    if not isinstance(item, str):
        return item
    if _awaits_secret(before) and not item.startswith("-"):
        found.add(item)
        return REDACTED
    flag = _FLAG.match(item)
    if flag is not None and _says_secret(flag[1]):
        found.add(flag[2])
        return f"{flag[1]}={REDACTED}"
    return _IN_COMMAND.sub(lambda word: _hidden(word, found), item)


def _awaits_secret(item: Any) -> bool:
    is_flag = isinstance(item, str) and item.startswith("-") and _FLAG.match(item) is None
    return is_flag and " " not in item and _says_secret(item)


def _hidden(word: re.Match[str], found: set[str]) -> str:
    name, value = word[1] or word[2], word[3].strip("'\"")
    if not _says_secret(name) or value.startswith(("$", "-")):  # a reference is no secret
        return word[0]
    found.add(value)
    return name + REDACTED


def _in_url(text: str, found: set[str]) -> str:
    """Hide the password of an address such as postgres://user:password@host."""
    found.update(password for _, password in _IN_URL.findall(text))
    return _IN_URL.sub(rf"\1{REDACTED}", text)


def _says_secret(name: str) -> bool:
    """Tell whether a word of a setting's name, in any case style, says that it is a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    pairs = [a + b for a, b in itertools.pairwise(words)]
    return not _SECRET_WORDS.isdisjoint([*words, *pairs])
