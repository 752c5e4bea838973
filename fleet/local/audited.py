"""Audit entries of processes on the host of the supervisor that have no event loop."""

import getpass
import re
import socket
from collections.abc import Callable
from pathlib import Path

from baton.telemetry.otlp import LogExport
from baton.tenants.audit import file as audit_file
from baton.tenants.audit.chain import Entry


def operator_name() -> str:
    """Return the user of this command and its host, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return re.sub(r"[^A-Za-z0-9_.@-]", "_", f"{user}@{socket.gethostname()}")[:128]


def audit_here(
    path: Path,
    verb: str,
    what: str = "",
    *,
    say: Callable[[str], None],
    after: object = None,
) -> None:
    """Append an entry to the audit log of a fleet; a failure is only reported.

    ``say``: receives the problem, if the entry cannot be written.
    """
    who = f"operator {operator_name()}"
    entry = Entry(verb=verb, what=what, who=who, source=socket.gethostname(), after=after)
    try:
        lines = audit_file.append(path, [entry])
    except (OSError, ValueError) as error:
        say(f"warning: cannot write the audit log: {error}")
        return
    export = LogExport("supervisor")
    for line in lines:
        export.emit(line)
    export.close()
