"""Position of one router among those that share its port."""

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Position of one router in a group of ``count``.

    Attributes:
        index: Position from 0, which a restarted router keeps.
        folder: Folder of the group, private to this user, with the routers' Unix sockets.
        sockets: Sockets that listen on the port, one per position; a single one if the kernel
            cannot share a port (``SO_REUSEPORT``). Their owner outlives the routers.
    """

    index: int
    count: int
    folder: Path
    sockets: tuple[socket.socket, ...]

    @property
    def own_socket(self) -> socket.socket:
        """The socket that this router accepts from."""
        return self.sockets[self.index % len(self.sockets)]

    @property
    def siblings(self) -> tuple[int, ...]:
        """Positions of the other routers."""
        return tuple(index for index in range(self.count) if index != self.index)

    def http_path(self, index: int) -> Path:
        """Return the Unix socket on which a router answers the others."""
        return self.folder / f"{index}.http"

    def alive_path(self, index: int) -> Path:
        """Return the Unix socket on which a router sends its heartbeats."""
        return alive_path(self.folder, index)


def alive_path(folder: Path, index: int) -> Path:
    """Return the Unix socket on which a serving router sends process id and heartbeats."""
    return folder / f"{index}.alive"
