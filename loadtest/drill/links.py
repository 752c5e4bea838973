"""Degrades the network of one worker with nftables rules for its port.

The rules are in a table of their own. A shell adds them, and removes them when its standard input
closes, so that they disappear with this process even if it is killed.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from subprocess import PIPE

from loadtest.drill.fleet import DrillError

_SCRIPT = 'nft -f - <<< "$1" && echo ready && { cat >/dev/null; nft delete table inet "$2"; }'


def missing_requirement() -> str:
    """Return why rules cannot be set here, or "" if they can."""
    if shutil.which("nft") is None:
        return "needs nft (Debian's package nftables)"
    return "" if os.geteuid() == 0 else "needs root, as nftables rules do"


def cut(port: int) -> str:
    """Return rules that drop everything to and from a TCP port."""
    return f"tcp dport {port} drop; tcp sport {port} drop"


def slow(port: int, bytes_per_s: int) -> str:
    """Return rules that drop what a port sends above a rate.

    The kernel's bucket holds one second's bytes plus the burst, which pass at once.
    """
    burst_bytes = max(bytes_per_s // 4, 65_536)
    limit = f"limit rate over {bytes_per_s} bytes/second burst {burst_bytes} bytes"
    return f"tcp sport {port} {limit} drop"


@contextlib.asynccontextmanager
async def rules(body: str) -> AsyncIterator[None]:
    """Apply rules from `cut` or `slow` to arriving packets on all interfaces, with loopback."""
    if problem := missing_requirement():
        raise DrillError(problem)
    name = f"baton_drill_{os.getpid()}"
    chain = f"chain in {{ type filter hook input priority 0; {body}; }};"
    table = f"table inet {name} {{ {chain} }}"
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", _SCRIPT, "drill", table, name, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert shell.stdin is not None and shell.stdout is not None and shell.stderr is not None
    try:
        if (await shell.stdout.readline()).strip() != b"ready":
            output = (await shell.stderr.read()).decode(errors="replace").strip()
            raise DrillError(f"nftables: {output}")
        yield
    finally:
        shell.stdin.close()
        await shell.wait()
