"""Places of connections. Sans-IO.

    new ──▶ waiting for a header ──▶ busy with a request ──▶ idle, kept alive ──▶ waiting …
               └──────── a router without a free place closes one of these ──┘

When all places are taken, a new connection gets that of the longest idle one, first of those whose
clients have shown no valid key. If none is idle, it gets a place of the reserve, and its request
that of the connection that waits longest for a header. If all are busy, only health probes and
requests with a valid key are served in the reserve.

The same holds for connections of an address that has half of all places, so that one client cannot
take all of them. An IPv6 address counts as its network of 64 bits, since a host has many addresses.
Loopback and configured proxies have no such limit: their address stands for many clients.
"""

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

_MIN_RESERVE = 16
_RESERVE_PART = 16  # one in so many places
_ADDRESS_PART = 2
_IPV6_BITS = 64

_Connection = TypeVar("_Connection")


def capacity(limit: int) -> int:
    """Return the number of places with the reserve."""
    return limit + max(limit // _RESERVE_PART, _MIN_RESERVE)


class Places(Generic[_Connection]):
    """Places of the connections of one router.

    Args:
        limit: Number of places without the reserve.
        proxies: Addresses and networks without a limit of their own.
    """

    def __init__(self, limit: int, proxies: Sequence[str] = ()) -> None:
        self.limit = limit
        self._most_of_an_address = max(limit // _ADDRESS_PART, 1)
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies]
        self._open: dict[_Connection, str] = {}  # with the address, "" if it has no limit
        self._of_address: Counter[str] = Counter()
        self._strangers: dict[_Connection, None] = {}  # idle, without a valid key
        self._waiting: dict[_Connection, None] = {}
        self._idle: dict[_Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: _Connection, address: str) -> _Connection | None:
        """Give a connection a place, and return the one that has to be closed for it."""
        counted = self._counted(address)
        victim = None
        if len(self._open) >= self.limit:
            victim = self._closed(self._strangers, self._idle)
        if victim is None and len(self._open) >= capacity(self.limit):
            victim = self._closed(self._waiting)
        self._open[connection] = counted
        self._of_address[counted] += 1
        self._waiting[connection] = None
        return victim

    def claim(self, connection: _Connection) -> _Connection | None:
        """Note a request, and return the connection that has to be closed for it."""
        self._move(connection, None)
        return self._closed(self._waiting) if len(self._open) > self.limit else None

    def _closed(self, *lines: dict[_Connection, None]) -> _Connection | None:
        """Take the place of the first connection of ``lines``."""
        for line in lines:
            for connection in line:
                self.leave(connection)
                return connection
        return None

    @property
    def is_crowded(self) -> bool:
        """True if more than half of the places are taken."""
        return 2 * len(self._open) > self.limit

    @property
    def is_in_reserve(self) -> bool:
        """True if a connection that has just entered is in the reserve."""
        return len(self._open) > self.limit

    @property
    def is_full(self) -> bool:
        """True if even the reserve is taken."""
        return len(self._open) > capacity(self.limit)

    def is_reserved(self, connection: _Connection) -> bool:
        """Return whether only a health probe or a valid key may use the connection's place."""
        address = self._open.get(connection, "")
        is_over = bool(address) and self._of_address[address] > self._most_of_an_address
        idle = len(self._strangers) + len(self._waiting) + len(self._idle)
        return is_over or len(self._open) - idle > self.limit

    def await_header(self, connection: _Connection) -> None:
        """Note that the connection waits for a header."""
        self._move(connection, self._waiting)

    def rest(self, connection: _Connection, *, has_key: bool) -> None:
        """Note that the connection is idle."""
        self._move(connection, self._idle if has_key else self._strangers)

    def leave(self, connection: _Connection) -> None:
        """Note that the connection is closed. Repeated calls have no effect."""
        self._move(connection, None)
        address = self._open.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def _move(self, connection: _Connection, line: dict[_Connection, None] | None) -> None:
        for other in (self._strangers, self._waiting, self._idle):
            other.pop(connection, None)
        if line is not None and connection in self._open:
            line[connection] = None

    def _counted(self, address: str) -> str:
        """Return the address or network that is limited; "" if it stands for many clients."""
        try:
            known = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:  # of a Unix socket
            return ""
        known = getattr(known, "ipv4_mapped", None) or known
        if known.is_loopback or any(known in network for network in self._proxies):
            return ""
        if known.version == 6:
            return str(ipaddress.ip_network((known, _IPV6_BITS), strict=False))
        return str(known)


def no_place(limit: int) -> str:
    """Return the message for a client without a place."""
    return (
        f"{limit} connections are open, the limit (clients.max_connections), or half of them of "
        "this address; retry later"
    )
