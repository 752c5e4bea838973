"""A worker whose frames are read slowly: ``python -m tests.workers.slow_prefill``."""

import time
from typing import Any

from fleet.worker.worker import main
from kvtransfer.pool_source import PoolSource

READ_S = 0.1  # of one slice


def copy_slowly(source: PoolSource, *arguments: Any) -> tuple[bytes, bytes]:
    """Instead of ``PoolSource._copy``."""
    time.sleep(READ_S)
    return _copy(source, *arguments)


def digest_slowly(source: PoolSource, blocks: Any, kv_slices: Any, bound: bytes) -> list[bytes]:
    """Instead of ``PoolSource._digests``."""
    time.sleep(READ_S * len(kv_slices))
    return _digests(source, blocks, kv_slices, bound)


if __name__ == "__main__":
    _copy, _digests = PoolSource._copy, PoolSource._digests
    PoolSource._copy = copy_slowly  # type: ignore[method-assign]
    PoolSource._digests = digest_slowly  # type: ignore[method-assign]
    main()
