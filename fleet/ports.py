"""Choice of ports from the range that a firewall opens for workers."""

import logging
import random
import socket

from baton.addresses import family_of
from baton.types.errors import InternalError

LEAST_PORTS = 2  # of a worker: gRPC, metrics
_LOG = logging.getLogger(__name__)
PORTS_OF_A_WORKER = 3  # gRPC, metrics, KV; a separate rank: gRPC, commands, gloo's store


def free_port(host: str, allowed: str) -> int:
    """Return a free port of the range; 0, with which the kernel chooses, without a range.

    The search starts at a random port, so that workers that start together seldom collide. If
    another process takes the port first, the start fails and is retried.
    """
    if not allowed:
        return 0
    first, _, last = allowed.partition("-")
    ports = range(int(first), int(last) + 1)
    begin = random.randrange(len(ports))
    for step in range(len(ports)):
        port = ports[(begin + step) % len(ports)]
        with socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise InternalError(
        f"pools.ports = {allowed}: all ports are taken on {host}; enlarge the range"
    )


def chosen_port(host: str, allowed: str) -> int:
    """Return a free port, for a program that must be given one, of the range if there is one."""
    port = free_port(host, allowed)
    if port:
        return port
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        found: int = probe.getsockname()[1]
    return found


def kv_listener(host: str, allowed: str, workers: int) -> socket.socket | None:
    """Return a listening socket for KV transfers by TCP; None if the range is too small.

    ``workers`` counts workers and separate ranks on this host, whose other ports come first.
    """
    first, _, last = allowed.partition("-")
    if allowed and int(last) - int(first) + 1 < PORTS_OF_A_WORKER * workers:
        _LOG.info("not offering KV by TCP: ports=%s has fewer than three per worker", allowed)
        return None
    return socket.create_server((host, free_port(host, allowed)), family=family_of(host))
