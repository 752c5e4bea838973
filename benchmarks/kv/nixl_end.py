"""One end of a NIXL transfer; runs in its own environment, without Baton: see ``peers.py``.

    nixl_end.py send|read BYTES RUN_BYTES

``send`` says its metadata and address, then waits for standard input to close; ``read`` takes that
line and answers each further line with the seconds of one READ of all runs.
"""

import json
import mmap
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


def main() -> None:
    """Hold memory, or read it."""
    role, size_bytes, run_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory[:] = 1 if role == "send" else 0
    address = int(memory.__array_interface__["data"][0])
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, size_bytes, 0, "")], "DRAM")
    if role == "send":
        told = {"metadata": agent.get_agent_metadata().hex(), "address": address}
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        return
    told = json.loads(sys.stdin.readline())
    name = agent.add_remote_agent(bytes.fromhex(told["metadata"]))
    offsets = range(0, size_bytes, run_bytes)
    ours = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _runs(address, offsets, run_bytes), "DRAM")
    theirs = agent.prep_xfer_dlist(name, _runs(told["address"], offsets, run_bytes), "DRAM")
    every = list(range(len(offsets)))
    print("ready", flush=True)
    for _line in sys.stdin:
        began_s = time.perf_counter()
        work = agent.make_prepped_xfer("READ", ours, every, theirs, every)
        state = agent.transfer(work)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(work)
        taken_s = time.perf_counter() - began_s
        agent.release_xfer_handle(work)
        right = state == "DONE" and bool(memory.all())
        memory[:] = 0
        print(taken_s if right else "failed", flush=True)


def _runs(address: int, offsets: range, run_bytes: int) -> list[tuple[int, int, int]]:
    return [(address + offset, run_bytes, 0) for offset in offsets]


if __name__ == "__main__":
    main()
