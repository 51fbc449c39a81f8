"""What this process wrote itself, until the watch brings it: a decision must not miss it."""

import time
from dataclasses import dataclass, replace

from ling_operator.reflector import Key
from ling_operator.run_view import RunView
from ling_operator.views import JobSetView
from ling_operator.workload import WorkloadView

_SEEN_SECONDS = 30.0
_REPLACED_KEPT = 16


@dataclass(frozen=True, slots=True)
class _Written:
    """Our own status writes of a run.

    While a watch is silent one follows another: each needs the version that the last one made.

    Attributes:
      before: versions of the object that we replaced, the oldest first.
      after: the object as of the last write.
    """

    before: tuple[str, ...]
    after: RunView


@dataclass(frozen=True, slots=True)
class _Created:
    """A JobSet that we made."""

    jobset: JobSetView
    until: float


@dataclass(frozen=True, slots=True)
class _Patched:
    """A field that we changed: what it is from this version of the object on."""

    version: str
    value: bool
    until: float


class OwnWrites:
    """Remembers the newest state of each object that this process wrote."""

    def __init__(self) -> None:
        self._written: dict[Key, _Written] = {}
        self._created: dict[Key, _Created] = {}
        self._patched: dict[Key, dict[str, _Patched]] = {}

    def newest_run(self, key: Key, seen: RunView | None) -> RunView | None:
        """Return a run with our last status write, even before the watch shows it.

        Args:
          key: of the run.
          seen: the run as cached.
        """
        written = self._written.get(key)
        if seen is None or written is None:
            return seen
        if seen.version is not None and seen.version in written.before:
            return written.after
        del self._written[key]
        return seen

    def newest_jobset(self, key: Key, seen: JobSetView | None) -> JobSetView | None:
        """Return a run's JobSet, as we just made or changed it even before the watch shows it.

        Args:
          key: of the run.
          seen: the JobSet as cached.
        """
        created = self._created.get(key)
        if created is not None and seen is None and time.monotonic() < created.until:
            seen = created.jobset
        elif created is not None:
            del self._created[key]
        if seen is None:
            return None
        suspended = self._value(key, seen.uid, seen.version)
        return seen if suspended is None else replace(seen, suspended=suspended)

    def newest_workload(self, key: Key, seen: WorkloadView | None) -> WorkloadView | None:
        """Return a JobSet's Workload, as we have just changed it even before the watch shows it.

        Args:
          key: of the run.
          seen: the Workload as cached.
        """
        if seen is None:
            return None
        active = self._value(key, seen.uid, seen.version)
        return seen if active is None else replace(seen, active=active)

    def patched(self, key: Key, uid: str, *, version: str, value: bool) -> None:
        """Take a change of spec.suspend of a JobSet, or of spec.active of a Workload.

        Args:
          key: of the run.
          uid: of the object.
          version: that the API server answered with.
          value: what the field is now.
        """
        until = time.monotonic() + _SEEN_SECONDS
        self._patched.setdefault(key, {})[uid] = _Patched(version, value, until)

    def _value(self, key: Key, uid: str, version: str) -> bool | None:
        """Return what we changed an object's field to, unless this version has that already."""
        patched = self._patched.get(key, {}).get(uid)
        if patched is None:
            return None
        comparable = version.isdigit() and patched.version.isdigit()
        is_older = comparable and int(version) < int(patched.version)
        if is_older and time.monotonic() < patched.until:
            return patched.value
        del self._patched[key][uid]
        return None

    def wrote_status(self, key: Key, *, replaced: str, after: RunView) -> None:
        """Take a status write that succeeded.

        Args:
          key: of the run.
          replaced: the version that was replaced.
          after: the object as the API server returned it.
        """
        earlier = self._written.get(key)
        before: tuple[str, ...] = ()
        if earlier is not None and earlier.after.version == replaced:
            # The cache still holds the first of them; of the rest a few will do.
            before = (*earlier.before[:1], *earlier.before[1:][-_REPLACED_KEPT:])
        self._written[key] = _Written(before=(*before, replaced), after=after)

    def created_jobset(self, key: Key, jobset: JobSetView) -> None:
        """Take a JobSet that the API server made for us."""
        self._created[key] = _Created(jobset, time.monotonic() + _SEEN_SECONDS)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a run that is gone."""
        self._written.pop(key, None)
        self._created.pop(key, None)
        self._patched.pop(key, None)
