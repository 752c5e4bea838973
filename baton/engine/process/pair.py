"""End of a two-rank group in a separate process: ``python -m baton.engine.process.pair``.

It moves bytes between shared staging memory and the other rank, as ordered by its parent. The
parent ends a hanging collective by killing this process.

Control socket (messages of ``ORDER``): the sending rank reports the port of its store. The parent
then sends orders (number, offset, size), and each is answered with its number when done.
"""

import argparse
import mmap
import socket
import struct
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo

from baton.addresses import split_address
from baton.engine.parent import die_with_parent

ORDER = struct.Struct("<QQQ")
SENDER = 0
RECEIVER = 1
MEETING_S = 30.0
DEADLINE_S = 30.0  # limit of one send or receive; the parent's limit is shorter


class Pair:
    """Process group of two ranks: gloo for the device "cpu", NCCL for a CUDA device."""

    def __init__(self, rank: int, store: TCPStore, host: str, device: str) -> None:
        self._rank = rank
        self._device = torch.device(device)
        self._group = _group(self._device, store, rank, host)

    def move(self, staged: torch.Tensor) -> None:
        """Send the staged bytes, or receive into them; raise ``RuntimeError`` at a failure."""
        other = 1 - self._rank
        if self._device.type == "cpu":
            moved = staged
        elif self._rank == SENDER:
            moved = staged.to(self._device)
        else:
            moved = torch.empty_like(staged, device=self._device)
        work = self._group.send if self._rank == SENDER else self._group.recv
        work([moved], other, 0).wait()
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
            if self._rank == RECEIVER:
                staged.copy_(moved)


def _group(device: torch.device, store: TCPStore, rank: int, host: str) -> Any:
    timeout = timedelta(seconds=DEADLINE_S)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds

        torch.cuda.set_device(device)
        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # noqa: SLF001
        return ProcessGroupNCCL(store, rank, 2, nccl)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to name an interface
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return gloo(store, rank, 2, options)


def serve(control: socket.socket, staging_fd: int, pair: Pair) -> None:
    """Execute orders until the parent closes the socket."""
    staging = torch.frombuffer(mmap.mmap(staging_fd, 0), dtype=torch.uint8)
    while len(order := control.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
        number, offset, size = ORDER.unpack(order)
        pair.move(staging[offset : offset + size])
        control.sendall(ORDER.pack(number, offset, size))


def main() -> None:
    """Connect to the other rank, then serve orders."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("store", help="HOST:PORT of the sender's store; port 0 chooses a free one")
    parser.add_argument("host", help="address of the network interface")
    parser.add_argument("device")
    parser.add_argument("control_fd", type=int)
    parser.add_argument("staging_fd", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store_host, port = split_address(options.store)
    control = socket.socket(fileno=options.control_fd)
    store = TCPStore(
        store_host,
        port,
        world_size=2,
        is_master=options.rank == SENDER,
        timeout=timedelta(seconds=MEETING_S),
        wait_for_workers=False,
    )
    if options.rank == SENDER:
        control.sendall(ORDER.pack(store.port, 0, 0))
    pair = Pair(options.rank, store, options.host, options.device)
    control.sendall(ORDER.pack(0, 0, 0))  # the group is connected
    serve(control, options.staging_fd, pair)


if __name__ == "__main__":
    main()
