"""Names of workers: ``worker-N``; in earlier versions ``prefill-N`` and ``decode-N``."""

import re

from baton.registry.types import Role

_NAME = re.compile(r"(worker|prefill|decode)-(\d+)", re.ASCII)


def worker_name(number: int) -> str:
    """Return the id of a worker by its number."""
    return f"worker-{number}"


def is_worker_name(text: str) -> bool:
    """Return whether a text is the id of a worker of a fleet."""
    return _NAME.fullmatch(text) is not None


def number_of(worker_id: str) -> int:
    """Return the number in a worker's id."""
    return int(worker_id.rpartition("-")[2])


def role_in_name(worker_id: str) -> Role | None:
    """Return the role in an id of an earlier version; None for ``worker-N``."""
    if worker_id.startswith("prefill-"):
        return "prefill"
    return "decode" if worker_id.startswith("decode-") else None
