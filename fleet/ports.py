"""Ports that a worker may listen on, where a firewall must know them."""

import random
import socket

from engine.core.errors import InternalError


def free_port(host: str, allowed: str) -> int:
    """A port that nobody listens on now; 0, which lets the kernel choose, where all are allowed.

    The first to be tried is random, so that workers that start together seldom meet. One that is
    taken in between ends the start, which is tried again.

    Args:
        host: The address to listen on.
        allowed: ``FIRST-LAST``, or empty.

    Raises:
        InternalError: All of them are taken.
    """
    if not allowed:
        return 0
    first, _, last = allowed.partition("-")
    ports = range(int(first), int(last) + 1)
    begin = random.randrange(len(ports))
    for step in range(len(ports)):
        port = ports[(begin + step) % len(ports)]
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise InternalError(f"pools.ports = {allowed}: all are taken on {host}")
