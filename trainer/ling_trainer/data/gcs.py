"""Google Cloud Storage: exact ranges of an object, until they are here or the time is up.

Credentials are the environment's own (Workload Identity, application default credentials), and so
is STORAGE_EMULATOR_HOST, which Google's client reads.
"""

import functools
import http.client
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import urllib3
from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError
from google.cloud import storage

from ling_trainer.data.index_file import DataError, StorageError

SCHEME = "gs://"
BLOCK_BYTES = 8 << 20
"""Largest single read; longer ranges are read as several, at the same time."""
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 8.0
_THREADS = 32
# What a later attempt cannot change. All else may pass: 408, 429, 5xx, a torn or silent line.
_FINAL = (
    exceptions.BadRequest,
    exceptions.Unauthorized,
    exceptions.Forbidden,
    exceptions.NotFound,
    exceptions.PreconditionFailed,
    exceptions.RequestRangeNotSatisfiable,
)
_PASSING = (
    exceptions.GoogleAPICallError,
    GoogleAuthError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,  # those of requests too, and a future's timeout
)


@dataclass(frozen=True)
class StoredObject:
    """An object as it was when it was looked up; a later version is never read.

    Attributes:
      bucket: its bucket.
      name: its name there.
      size: bytes.
      generation: its version.
      crc32c: checksum of the whole, base64 of big-endian.
    """

    bucket: str
    name: str
    size: int
    generation: int
    crc32c: str

    @property
    def url(self) -> str:
        """Its gs:// address."""
        return f"{SCHEME}{self.bucket}/{self.name}"


class Storage:
    """Looks objects up and reads them. Safe to use from many threads.

    Each of its own threads has a connection of its own; they end with it.

    Attributes:
      timeout: seconds after which a read is given up, all its attempts together.
      attempt_timeout: seconds after which one attempt is, whether the server is silent or slow.
    """

    def __init__(self, *, timeout: float, attempt_timeout: float = 15.0) -> None:
        """Connect to nothing yet."""
        self.timeout = timeout
        self.attempt_timeout = attempt_timeout
        self._local = threading.local()
        self._clients: list[Any] = []
        weakref.finalize(self, _disconnect, self._clients)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gcs")

    def look_up(self, url: str) -> StoredObject:
        """Find an object.

        Raises:
          DataError: there is none, or it may not be read.
          StorageError: no answer in time.
        """
        bucket, slash, name = url.removeprefix(SCHEME).partition("/")
        if not (bucket and slash and name):
            raise DataError(f"{url}: is no object; write gs://bucket/path/of/prefix")

        def attempt() -> StoredObject:
            blob = self._client().bucket(bucket).blob(name)
            blob.reload(timeout=self.attempt_timeout, retry=None)
            return StoredObject(bucket, name, blob.size, blob.generation, blob.crc32c)

        return self._gather([_Task(url, attempt)])[0]

    def read(self, stored: StoredObject, ranges: Sequence[range]) -> list[bytes]:
        """Read byte ranges at the same time, and nothing beside them.

        Raises:
          DataError: the object is not what it was, or may not be read.
          StorageError: not everything arrived in time.
        """
        owners: list[int] = []
        tasks: list[_Task[bytes]] = []
        for i, part in enumerate(ranges):
            for start in range(part.start, part.stop, BLOCK_BYTES):
                block = range(start, min(start + BLOCK_BYTES, part.stop))
                where = f"{stored.url}, bytes {block.start} to {block.stop - 1}"
                tasks.append(_Task(where, functools.partial(self._fetch, stored, block)))
                owners.append(i)
        parts: list[list[bytes]] = [[] for _ in ranges]
        for i, data in zip(owners, self._gather(tasks), strict=True):
            parts[i].append(data)
        return [b"".join(part) for part in parts]

    def _fetch(self, stored: StoredObject, block: range) -> bytes:
        blob = self._client().bucket(stored.bucket).blob(stored.name, generation=stored.generation)
        data: bytes = blob.download_as_bytes(
            start=block.start,
            end=block.stop - 1,
            timeout=self.attempt_timeout,
            checksum=None,  # a range has none of its own
            retry=None,
            raw_download=True,
        )
        if len(data) != len(block):
            raise ConnectionError(f"{len(data)} bytes came instead of {len(block)}")
        return data

    def _gather[T](self, tasks: "Sequence[_Task[T]]") -> list[T]:
        """Run tasks at the same time, each until it succeeds, cannot succeed, or time is up."""
        deadline = time.monotonic() + self.timeout
        while open_tasks := [task for task in tasks if not task.results]:
            now = time.monotonic()
            for task in open_tasks:
                if task.future is None and now >= task.due:
                    task.future = self._threads.submit(task.attempt)
                    # The library's own timeout counts from byte to byte; this is for the whole.
                    task.due = min(now + self.attempt_timeout, deadline)
                    task.attempts += 1
            running = [task.future for task in open_tasks if task.future is not None]
            wait_for = max(0.0, min(task.due for task in open_tasks) - now)
            if running:
                wait(running, timeout=wait_for, return_when=FIRST_COMPLETED)
            else:
                time.sleep(wait_for)
            for task in open_tasks:
                self._settle(task, deadline)
        return [task.results[0] for task in tasks]

    def _settle(self, task: "_Task[Any]", deadline: float) -> None:
        """Take a task's result, or plan its next attempt."""
        now, future = time.monotonic(), task.future
        if future is None or not (future.done() or now >= task.due):
            return
        task.future = None
        try:
            # Of a future that is not done this is a TimeoutError at once.
            task.results.append(future.result(timeout=0))
        except _FINAL as error:
            raise _refusal(task.where, error) from error
        except _PASSING as error:
            future.cancel()  # where it has not begun
            # Full jitter, so that many hosts do not come back at the same moment.
            longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2**task.attempts)
            task.due = now + random.uniform(0, longest)  # noqa: S311
            if task.due >= deadline:
                raise StorageError(
                    f"{task.where}: no answer in {self.timeout:g} s and {task.attempts} attempts, "
                    f"at last: {_first_line(error)}; raise data.storage_timeout if the storage is "
                    "only slow"
                ) from error

    def _client(self) -> Any:
        if not hasattr(self._local, "client"):
            self._local.client = storage.Client()
            self._clients.append(self._local.client)
        return self._local.client


@dataclass(eq=False)
class _Task[T]:
    """Something to be done by attempts.

    Attributes:
      where: what an error calls it.
      attempt: does it, or raises.
      attempts: begun so far.
      due: when the next attempt begins, or the present one is given up.
      future: the present attempt.
      results: of the attempt that succeeded.
    """

    where: str
    attempt: Callable[[], T]
    attempts: int = 0
    due: float = 0.0
    future: "Future[T] | None" = None
    results: list[T] = field(default_factory=list)


def _disconnect(clients: Sequence[Any]) -> None:
    for client in clients:
        client.close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__


def _refusal(where: str, error: exceptions.GoogleAPICallError) -> DataError:
    match error:
        case exceptions.NotFound():
            problem = "is not there, or was replaced after the run had opened it"
            remedy = "data.dataset_path is the path of a .bin/.idx pair without the endings"
        case exceptions.Unauthorized() | exceptions.Forbidden():
            problem = f"may not be read ({_first_line(error)})"
            remedy = "give the service account roles/storage.objectViewer on the bucket"
        case _:
            problem = f"was refused ({_first_line(error)})"
            remedy = "copy the file again, or name another"
    return DataError(f"{where}: {problem}; {remedy}")
