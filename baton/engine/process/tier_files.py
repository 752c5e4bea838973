"""Names of the files in a disk tier's folder."""

import os
import re
from pathlib import Path

SUFFIX = ".kv"
NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
"""Name of a complete file: its block hash."""


def hashes_in(folder: Path) -> list[bytes]:
    """Return the hashes of the blocks in a folder; files of others are skipped."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if NAME.fullmatch(entry.name)]
    return [bytes.fromhex(name.removesuffix(SUFFIX)) for name in names]
