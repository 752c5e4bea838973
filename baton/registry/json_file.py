"""Small JSON files that outlive the process that writes them."""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

_LOG = logging.getLogger(__name__)


def keep(file: Path | None, value: Any) -> None:
    """Write ``value`` as JSON, atomically, for this user only. None as file writes nothing.

    A failure is only logged.
    """
    if file is None:
        return
    scratch = file.with_suffix(f".{os.getpid()}.new")  # routers of one host share the file
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(value))
        scratch.replace(file)
    except OSError as error:
        _LOG.warning("cannot write %s: %s", file, error)
