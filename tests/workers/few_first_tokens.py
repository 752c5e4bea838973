"""A prefill worker that sends one first token too few."""

from collections.abc import Iterator
from typing import Any

import fleet.worker.worker
import prefill_worker.announcer as announcer


def too_few(*arguments: Any) -> Iterator[Any]:
    """Instead of ``first_tokens_to_wire``."""
    for message in _all(*arguments):
        if message.choices:
            del message.choices[-1]
        yield message


if __name__ == "__main__":
    _all = announcer.first_tokens_to_wire
    announcer.first_tokens_to_wire = too_few
    fleet.worker.worker.main()
