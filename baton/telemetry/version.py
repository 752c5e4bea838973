"""Version of this installation, with the commit that it was built from."""

import importlib.metadata
import subprocess
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_FILE = _PACKAGE / "commit.txt"  # `make wheel` writes it
_SHOWN = 10


@cache
def version() -> str:
    """Return the version as ``0.1.0+05a6f79c12``, or ``0.1.0`` if the commit is unknown."""
    released = importlib.metadata.version("baton-serve")
    commit = _commit()
    return f"{released}+{commit[:_SHOWN]}" if commit else released


def _commit() -> str:
    """Return the commit of this wheel or checkout, or ""."""
    if _FILE.is_file():
        return _FILE.read_text(encoding="ascii").strip()
    if not (_PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(_PACKAGE.parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
