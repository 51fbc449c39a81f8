"""Waiting inside an event loop for what another task brings about."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Return once `condition()` is true.

    Raises:
      TimeoutError: it was not in that time.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
