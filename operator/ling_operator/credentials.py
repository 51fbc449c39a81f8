"""The Authorization header of our requests: read again now and then, by one request for all."""

import asyncio
import time

from ling_operator.connection import Connection

_SECONDS = 30.0


class Credentials:
    """Keeps what a connection's authorization() returned last."""

    def __init__(self, connection: Connection) -> None:
        self._authorization = connection.authorization
        self._reading = asyncio.Lock()
        self._header: str | None = None
        self._until = float("-inf")

    async def header(self) -> str | None:
        """Return the header's value, at most 30 s old; None where none is needed.

        Raises:
          NoClusterError: it cannot be had.
        """
        async with self._reading:  # or every request that waits would start a plugin
            now = time.monotonic()
            if now >= self._until:
                self._header = await asyncio.to_thread(self._authorization)
                self._until = now + _SECONDS
            return self._header

    def refused(self) -> None:
        """Read it again for the next request: the API server does not accept it any more."""
        self._until = float("-inf")
