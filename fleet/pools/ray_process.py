"""Setup of Baton's processes under Ray: log file and node address."""

import faulthandler
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.telemetry.logs import LogFormat, set_up_logs
from fleet.private_logs import open_log

_LOG_LIMIT_BYTES = 16 * 2**20  # checked when a worker starts; one older file is kept


def on_this_node(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which an empty ``host`` is replaced by this node's address."""
    if settings["host"]:
        return dict(settings)
    import ray

    return {**settings, "host": ray.util.get_node_ip_address()}


def log_to(file: Path, layout: LogFormat = "text", **fields: str) -> None:
    """Redirect output and crash dumps of this process and its children to one file.

    ``file``: log file; it is rotated if it is too large. ``fields``: fields of every JSON object,
    such as ``fleet`` and ``worker``.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > _LOG_LIMIT_BYTES:
        file.replace(file.with_suffix(".log.1"))
    sys.stdout.flush()
    sys.stderr.flush()
    with open_log(file) as opened:
        for stream in (1, 2):
            os.dup2(opened.fileno(), stream)
    faulthandler.enable(file=2, all_threads=True)
    set_up_logs(layout, before=f"{os.getpid()} ", fields=fields)
