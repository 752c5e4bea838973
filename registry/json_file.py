"""Small JSON files that outlive the process that writes them."""

import logging
from pathlib import Path
from typing import Any

import msgspec

_LOG = logging.getLogger(__name__)


def keep(file: Path | None, value: Any) -> None:
    """Write ``value``, whole or not at all; a disk that refuses costs only the memory of it.

    Args:
        file: Where; None keeps nothing.
        value: What ``msgspec`` can write as JSON.
    """
    if file is None:
        return
    draft = file.with_suffix(".new")
    try:
        draft.write_bytes(msgspec.json.encode(value))
        draft.replace(file)
    except OSError as error:
        _LOG.warning("cannot write %s: %s", file, error)
