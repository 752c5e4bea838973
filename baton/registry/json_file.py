"""Small JSON files that outlive the process that writes them."""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

_LOG = logging.getLogger(__name__)


def keep(file: Path | None, value: Any) -> None:
    """Write ``value`` as JSON, atomically; a failure is only logged. None writes nothing."""
    if file is None:
        return
    scratch = file.with_suffix(f".{os.getpid()}.new")  # routers of one host share the file
    try:
        scratch.write_bytes(msgspec.json.encode(value))
        scratch.replace(file)
    except OSError as error:
        _LOG.warning("cannot write %s: %s", file, error)
