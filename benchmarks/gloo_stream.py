"""Rate of a bare two-rank gloo group: ``python -m benchmarks.gloo_stream RANK PORT``.

Rank 0 prints its store's port. Each line on standard input is a number of messages to move; the
response is "done" once they are moved.
"""

import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from baton.engine.process.pair import SENDER, Pair

MESSAGE_BYTES = 1 << 20
MEETING = timedelta(seconds=30)


def main() -> None:
    """Move messages until standard input closes."""
    rank = int(sys.argv[1])
    port = int(sys.argv[2])
    torch.set_num_threads(1)
    store = TCPStore(
        "127.0.0.1",
        port,
        world_size=2,
        is_master=rank == SENDER,
        timeout=MEETING,
        wait_for_workers=False,
    )
    if rank == SENDER:
        print(store.port, flush=True)
    pair = Pair(rank, store, "127.0.0.1", "cpu")
    message = torch.ones(MESSAGE_BYTES, dtype=torch.uint8)
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            pair.move(message)
        print("done", flush=True)


if __name__ == "__main__":
    main()
