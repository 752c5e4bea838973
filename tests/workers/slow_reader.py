"""A worker that takes its time to read lent pages: ``python -m tests.workers.slow_reader``."""

import time
from typing import Any

from fleet.worker.worker import main
from kvtransfer.lent_pages import LentFrame

READ_S = 0.3  # of one slice


def store_slowly(frame: LentFrame, *arguments: Any) -> None:
    """Instead of ``LentFrame.store``."""
    time.sleep(READ_S)
    _store(frame, *arguments)


if __name__ == "__main__":
    _store = LentFrame.store
    LentFrame.store = store_slowly  # type: ignore[method-assign]
    main()
