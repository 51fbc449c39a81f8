"""Ports for processes that bind them later."""

import random
import socket
from contextlib import ExitStack, suppress

_FIRST, _LAST = 15_000, 32_000  # Linux gives outgoing connections those from 32768 on


def free_ports(count: int) -> list[int]:
    """Return different ports that are free on every address.

    The time until they are bound is seconds, in which a port of the kernel's own range may go to
    any connection of the machine.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe, port = stack.enter_context(socket.socket()), random.randint(_FIRST, _LAST)
            with suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
        return ports
