"""Ports that a worker may listen on, where a firewall must know them."""

import logging
import random
import socket

from baton.types.errors import InternalError

_LOG = logging.getLogger(__name__)
PORTS_OF_A_WORKER = 3  # gRPC, metrics, KV; a rank apart: gRPC, orders; and where ranks meet


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


def kv_listener(host: str, allowed: str, workers: int) -> socket.socket | None:
    """Listens for readers of KV; None where the range has no port to spare for it.

    Args:
        host: The address to listen on.
        allowed: As for `free_port`.
        workers: That share the range on this host, or ranks apart. The other ports of each come
            first.
    """
    first, _, last = allowed.partition("-")
    if allowed and int(last) - int(first) + 1 < PORTS_OF_A_WORKER * workers:
        _LOG.info("no port for KV by TCP: %s has less than three for each worker", allowed)
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, free_port(host, allowed)), family=family)
