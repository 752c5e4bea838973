"""Makes the network of one worker bad, with nftables rules for its port.

The rules stand in a table of their own. They are put there by a shell that takes them away when
its standard input ends, so that they go with this process however it dies.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from subprocess import PIPE

from loadtest.drill.fleet import DrillError

_SCRIPT = 'nft -f - <<< "$1" && echo there && { cat >/dev/null; nft delete table inet "$2"; }'


def why_not() -> str:
    """Why rules cannot be set here; empty if they can."""
    if shutil.which("nft") is None:
        return "needs nft (Debian's package nftables)"
    return "" if os.geteuid() == 0 else "needs root, as nftables rules do"


def cut(port: int) -> str:
    """Rules under which nothing comes to a TCP port or from it."""
    return f"tcp dport {port} drop; tcp sport {port} drop"


def slow(port: int, bytes_per_s: int) -> str:
    """Rules under which what comes from a port, above a rate, is lost.

    The kernel's bucket holds one second's worth beside the burst: so much comes at once.
    """
    burst_bytes = max(bytes_per_s // 4, 65_536)
    limit = f"limit rate over {bytes_per_s} bytes/second burst {burst_bytes} bytes"
    return f"tcp sport {port} {limit} drop"


@contextlib.asynccontextmanager
async def rules(body: str) -> AsyncIterator[None]:
    """Have these rules for what arrives, on this machine's every interface, loopback too.

    Args:
        body: Of `cut` or `slow`.

    Raises:
        DrillError: They cannot be set.
    """
    if problem := why_not():
        raise DrillError(problem)
    name = f"baton_drill_{os.getpid()}"
    chain = f"chain in {{ type filter hook input priority 0; {body}; }};"
    table = f"table inet {name} {{ {chain} }}"
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", _SCRIPT, "drill", table, name, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert shell.stdin is not None and shell.stdout is not None and shell.stderr is not None
    try:
        if (await shell.stdout.readline()).strip() != b"there":
            told = (await shell.stderr.read()).decode(errors="replace").strip()
            raise DrillError(f"nftables: {told}")
        yield
    finally:
        shell.stdin.close()
        await shell.wait()
