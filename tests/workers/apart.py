"""Programs of ranks that share nothing with their leaders, each a process of its own."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

from fleet.worker.rank import RankSettings
from tests.workers.harness import TOKEN


class RankApart:
    """One ``python -m fleet.worker.rank`` and the ``address`` that leader and workers ask."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @classmethod
    async def start(
        cls,
        program: Sequence[str] = ("fleet.worker.rank",),
        host: str = "127.0.0.1",
        **fields: object,
    ) -> "RankApart":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        settings = RankSettings(host=host, fleet_token=TOKEN, **fields)
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        return cls(process, line.decode().strip())

    async def stop(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
        await self.process.wait()


@contextlib.asynccontextmanager
async def ranks_apart(count: int, **fields: object) -> AsyncIterator[list[RankApart]]:
    started = await asyncio.gather(*(RankApart.start(**fields) for _ in range(count)))
    try:
        yield list(started)
    finally:
        await asyncio.gather(*(rank.stop() for rank in started))


def led(ranks: Sequence[RankApart]) -> dict[str, object]:
    """Settings of the worker that leads them."""
    return {
        "tensor_parallel": len(ranks) + 1,
        "rank_memory": "own",
        "rank_addresses": tuple(rank.address for rank in ranks),
    }
