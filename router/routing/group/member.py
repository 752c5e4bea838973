"""Where one router stands among those that share its port."""

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of ``count`` routers.

    Attributes:
        index: Its place, from 0; its next life has the same.
        folder: Of the group, for this user only: sockets by which the routers reach each other.
        sockets: That listen on the port, one for each place; a single one where the kernel cannot
            share a port among several (``SO_REUSEPORT``). Their holder outlives the routers.
    """

    index: int
    count: int
    folder: Path
    sockets: tuple[socket.socket, ...]

    @property
    def own_socket(self) -> socket.socket:
        """The one that this router accepts from."""
        return self.sockets[self.index % len(self.sockets)]

    @property
    def siblings(self) -> tuple[int, ...]:
        """The places of the others."""
        return tuple(index for index in range(self.count) if index != self.index)

    def http_path(self, index: int) -> Path:
        """Where the router of that place answers the others."""
        return self.folder / f"{index}.http"

    def alive_path(self, index: int) -> Path:
        """Where it says that it lives."""
        return alive_path(self.folder, index)


def alive_path(folder: Path, index: int) -> Path:
    """Where the router of that place says that it lives, with its process id, once it serves."""
    return folder / f"{index}.alive"
