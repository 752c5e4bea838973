"""Addresses of TCP ports as text: ``HOST:PORT``, with brackets around IPv6 hosts."""

import socket


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, or ``[HOST]:PORT`` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port.

    Raises:
        ValueError: The address has no port.
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a numeric host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
