"""Which runs concern which JobSet: each its own of its name, or the one that it watches. Pure."""

from collections.abc import Mapping

from ling_operator.api import TrainingRun
from ling_operator.run_view import RunView

type Key = tuple[str, str]
"""Namespace and name."""


class WatchIndex:
    """Kept up by note() with every change of a run."""

    def __init__(self) -> None:
        self._watched: dict[Key, Key] = {}
        self._watchers: dict[Key, set[Key]] = {}

    def note(self, key: Key, run: TrainingRun | None) -> None:
        """Take notice of a run, or for None that it is gone or cannot be read."""
        before = self._watched.pop(key, None)
        if before is not None:
            self._watchers[before].discard(key)
            if not self._watchers[before]:
                del self._watchers[before]
        if run is not None and run.spec.watch is not None:
            self._watched[key] = key[0], run.spec.watch.job_set
            self._watchers.setdefault(self._watched[key], set()).add(key)

    def jobset_of(self, key: Key) -> Key:
        """Return namespace and name of a run's JobSet: of its own name, or the one it watches."""
        return self._watched.get(key, key)

    def runs_of(self, jobset: Key, runs: Mapping[Key, RunView]) -> tuple[Key, ...]:
        """Return the runs that a JobSet of this name, with all that belongs to it, concerns."""
        own = jobset in runs and jobset not in self._watched
        return (*((jobset,) if own else ()), *sorted(self._watchers.get(jobset, ())))

    def other_watcher(self, key: Key, jobset_uid: str, runs: Mapping[Key, RunView]) -> str | None:
        """Return the name of another run that watches a run's JobSet; None if that may itself.

        The one that has watched it before goes first, else the first by name.
        """
        others = self._watchers.get(self.jobset_of(key), set()) - {key}
        for other in sorted(others):
            if _has_watched(runs.get(other), jobset_uid):
                return other[1]
        if _has_watched(runs.get(key), jobset_uid):
            return None
        return next((name for _, name in sorted(others) if name < key[1]), None)


def _has_watched(view: RunView | None, jobset_uid: str) -> bool:
    attempts = view.run.status.attempts if view is not None and view.run is not None else ()
    return any(each.job_set_uid == jobset_uid for each in attempts)
