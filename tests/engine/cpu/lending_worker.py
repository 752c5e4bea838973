"""A worker that claims its core and tells how many threads it may run, on each line of its input.

    python lending_worker.py TABLE OWN CORES

It answers ``claim``, ``lend`` and ``see`` with the number of threads that a job would run now, and
``compute SEED`` with a digest of products made meanwhile.
"""

import hashlib
import sys
from pathlib import Path

from baton.engine.cpu.cores import SharedCores
from baton.engine.cpu.native.library import load


def main() -> None:
    """Do what the lines say."""
    table, own, cores = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    shared = SharedCores(own, cores, cores, table)
    library = load()
    if library is None:
        raise SystemExit("no native kernels")
    for line in sys.stdin:
        verb, *more = line.split()
        answer: object = None
        if verb == "claim":
            shared.__enter__()
        elif verb == "lend":
            shared.lend()
        elif verb == "compute":
            answer = _digest(own, int(more[0]))
        sys.stdout.write(f"{answer or library.baton_threads_now(own)}\n")
        sys.stdout.flush()


def _digest(own: int, seed: int) -> str:
    import torch  # takes a second, and most of these workers need none

    from baton.engine.cpu.native.products import NativeWeight

    torch.set_num_threads(own)
    generator = torch.Generator().manual_seed(seed)
    weight = NativeWeight(torch.randn(640, 256, generator=generator).bfloat16())
    rows = torch.randn(200, 256, generator=generator).bfloat16()
    digest = hashlib.blake2b(digest_size=8)
    for _ in range(20):
        digest.update(weight(rows).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
