"""A worker whose frames are read slowly: ``python -m tests.workers.slow_prefill``."""

import time
from typing import Any

from fleet.worker import main
from prefill_worker.service import PrefillService

READ_S = 0.1


def read_slowly(service: PrefillService, *arguments: Any) -> tuple[bytes, bytes]:
    """Instead of ``PrefillService._read``."""
    time.sleep(READ_S)
    return _read(service, *arguments)


if __name__ == "__main__":
    _read = PrefillService._read
    PrefillService._read = read_slowly  # type: ignore[method-assign]
    main()
