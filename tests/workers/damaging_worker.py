"""A worker that damages what it sends: the damage, a line break and its settings on stdin."""

import io
import sys
from functools import partial

from fleet.worker import worker
from prefill_worker import service
from tests.kvtransfer.damaged_frames import DamagingSource


def main() -> None:
    damage, _, settings = sys.stdin.buffer.read().partition(b"\n")
    service.PoolSource = partial(DamagingSource, damage.decode())
    sys.stdin = io.TextIOWrapper(io.BytesIO(settings))
    worker.main()


if __name__ == "__main__":
    main()
