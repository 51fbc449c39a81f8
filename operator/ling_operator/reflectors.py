"""One kind of object in all namespaces watched: a reflector of each, read as one cache."""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from ling_operator.reflector import Change, Key, Reflector
from ling_operator.rest import JsonObject, RestClient

type Path = str | Callable[[], Awaitable[str]]


class Reflectors[T]:
    """A reflector for each namespace, or one of all of them where none is named.

    Args:
      namespaces: to watch; none for all.
      path: of the kind's collection in a namespace, or in all for None; see Reflector.
      on_synced: called with the namespace once it has been listed; see Reflector for the others.

    Attributes:
      each: the reflectors by namespace; the only one is under None where all are watched.
    """

    def __init__(
        self,
        client: RestClient,
        namespaces: Sequence[str],
        path: Callable[[str | None], Path],
        *,
        kind: str,
        view: Callable[[JsonObject], T],
        on_change: Callable[[Change[T]], None],
        on_synced: Callable[[str | None], None],
        label_selector: str | None = None,
    ) -> None:
        def reflector(namespace: str | None) -> Reflector[T]:
            return Reflector(
                client,
                path(namespace),
                kind=kind,
                namespace=namespace,
                view=view,
                on_change=on_change,
                on_synced=lambda: on_synced(namespace),
                label_selector=label_selector,
            )

        self.each: Mapping[str | None, Reflector[T]] = {
            namespace: reflector(namespace) for namespace in namespaces or (None,)
        }

    @property
    def objects(self) -> Mapping[Key, T]:
        """The objects of all namespaces, read-only."""
        if len(self.each) == 1:
            (only,) = self.each.values()
            return only.objects
        return _Joined(self.each)


class _Joined[T](Mapping[Key, T]):
    """The caches of several namespaces, where a key says which of them to look into."""

    def __init__(self, each: Mapping[str | None, Reflector[T]]) -> None:
        self._each = each

    def __getitem__(self, key: Key) -> T:
        return self._each[key[0]].objects[key]

    def __iter__(self) -> Iterator[Key]:
        return itertools.chain.from_iterable(each.objects for each in self._each.values())

    def __len__(self) -> int:
        return sum(len(each.objects) for each in self._each.values())
