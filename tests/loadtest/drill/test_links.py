"""Links made bad with nftables, in a network of the test's own."""

import json
import subprocess
import sys

import pytest

from loadtest.drill import faults as links

PROGRAM = """
import asyncio, json, socket, subprocess, sys, time
from loadtest.drill import faults as links

MB = 1_000_000

async def serve(size):
    async def answer(reader, writer):
        await reader.readline()
        writer.write(bytes(size))
        await writer.drain()
        writer.close()
    return await asyncio.start_server(answer, "127.0.0.1", 0)

async def took_s(port, limit_s):
    begin = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"go\\n")
            while await reader.read(65536):
                pass
            writer.close()
    except TimeoutError:
        return None
    return time.monotonic() - begin

def tables():
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout

async def main():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    server = await serve(4 * MB)
    port = server.sockets[0].getsockname()[1]
    told = {"free": await took_s(port, 5)}
    async with links.rules(links.cut(port)):
        told["cut"] = await took_s(port, 1)
    told["healed"] = await took_s(port, 5)
    async with links.rules(links.slow(port, MB)):
        told["slow"] = await took_s(port, 30)
    told["left"] = tables()
    try:
        async with links.rules("nonsense"):
            pass
    except links.DrillError as error:
        told["refused"] = str(error)
    if "die" in sys.argv:
        async with links.rules(links.cut(port)):
            print(tables().strip(), flush=True)
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps(told))

asyncio.run(main())
"""


def in_own_network(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "-n", *command], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.fixture(autouse=True)
def possible() -> None:
    if problem := links.missing_requirement():
        pytest.skip(f"links cannot be made bad here: {problem}")
    tried = in_own_network("nft", "add", "table", "inet", "try")
    if tried.returncode:
        pytest.skip(f"no network namespace with nftables: {tried.stderr.strip()}")


def test_a_link_is_cut_and_slow_and_heals() -> None:
    run = in_own_network(sys.executable, "-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["cut"] is None, "nothing came through"
    assert max(told["free"], told["healed"]) < told["slow"]
    assert told["slow"] > 2.7, "4 MB at 1 MB/s, of which 1.25 MB may come at once"
    assert told["left"] == ""
    assert "nonsense" in told["refused"]


def test_the_rules_go_with_a_killed_process() -> None:
    shell = f'{sys.executable} -c "$0" die; sleep 1; nft list tables; echo end'
    run = in_own_network("bash", "-c", shell, PROGRAM)
    there, end = run.stdout.splitlines()
    assert there.startswith("table inet baton_drill_"), run.stderr
    assert end == "end", "no table is left"
