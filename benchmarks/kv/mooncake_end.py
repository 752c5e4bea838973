"""One end of a Mooncake transfer by TCP; runs in its own environment: see ``peers.py``.

    mooncake_end.py send|read BYTES RUN_BYTES

As ``nixl_end.py``: ``send`` says where it is, ``read`` answers each line with the seconds of one
READ of all runs.
"""

import json
import mmap
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine


def main() -> None:
    """Hold memory, or read it."""
    role, size_bytes, run_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory[:] = 1 if role == "send" else 0
    address = int(memory.__array_interface__["data"][0])
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        sys.exit("it does not start")
    if engine.register_memory(address, size_bytes):
        sys.exit("memory cannot be registered")
    if role == "send":
        told = {"host": f"127.0.0.1:{engine.get_rpc_port()}", "address": address}
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        return
    told = json.loads(sys.stdin.readline())
    offsets = range(0, size_bytes, run_bytes)
    ours = [address + offset for offset in offsets]
    theirs = [told["address"] + offset for offset in offsets]
    sizes = [run_bytes] * len(offsets)
    print("ready", flush=True)
    for _line in sys.stdin:
        began_s = time.perf_counter()
        failed = engine.batch_transfer_sync_read(told["host"], ours, theirs, sizes)
        taken_s = time.perf_counter() - began_s
        right = not failed and bool(memory.all())
        memory[:] = 0
        print(taken_s if right else "failed", flush=True)


if __name__ == "__main__":
    main()
