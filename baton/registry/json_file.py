"""Small JSON files that outlive the process that writes them."""

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.folders import replace_file

_LOG = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def kept(file: Path | None, kind: type[_Value]) -> _Value | None:
    """Return the value in a file; None without a file, or if it is damaged, which is logged."""
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _LOG.warning("cannot read %s: %s", file, error)
        return None


def keep(file: Path | None, value: Any) -> None:
    """Write ``value`` as JSON into a file, if there is one. A failure is only logged."""
    if file is None:
        return
    try:
        replace_file(file, msgspec.json.encode(value))
    except OSError as error:
        _LOG.warning("cannot write %s: %s", file, error)
