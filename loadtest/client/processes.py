"""Several client processes that act as one: their shares of a plan, one clock, one list of ends."""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import IO

import msgspec

from loadtest.client.records import (
    ClientOrder,
    ClientReport,
    Message,
    Ready,
    RequestRecord,
    ServerOptions,
)
from loadtest.workloads.plan import Plan

_START_DELAY_S = 0.3
"""Between the last client's readiness and 0 s, so that all of them have heard of it."""

_MAX_LINE_BYTES = 1 << 26
_STOP_LIMIT_S = 5.0


class ClientFailedError(RuntimeError):
    """A client process ended before its work did: what was measured is not the whole load."""


async def run_clients(
    plan: Plan,
    server: ServerOptions,
    *,
    clients: int,
    record: Callable[[RequestRecord], None],
    keep_answers: bool = False,
    on_start: Callable[[float], None] | None = None,
) -> list[ClientReport]:
    """Send a plan from several processes.

    Args:
        plan: All of it; conversations are dealt out in turn.
        server: Where to, and how.
        clients: How many processes.
        record: Told of each request that ended, in the order of their ends, nearly.
        keep_answers: Whether records hold the answers' texts.
        on_start: Told the moment on the monotonic clock that the plan calls 0 s.

    Returns:
        A report of each client.

    Raises:
        ClientFailedError: A client died.
    """
    reports: list[ClientReport] = []
    async with contextlib.AsyncExitStack() as stack:
        running = []
        for number in range(clients):
            order = ClientOrder(
                client=number,
                server=server,
                plan=plan.share(number, clients),
                keep_answers=keep_answers,
            )
            running.append(await stack.enter_async_context(_client(order)))
        for client in running:
            await client.expect_ready()
        first_s = min((c.start_s for c in plan.conversations), default=0.0)
        zero_s = time.monotonic() + _START_DELAY_S - first_s
        if on_start is not None:
            on_start(zero_s)
        await _together(client.follow(zero_s, record, reports.append) for client in running)
    return sorted(reports, key=lambda report: report.client)


class _Client:
    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self._messages: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)

    async def _next(self) -> RequestRecord | ClientReport | Ready:
        out = self._process.stdout
        line = await out.readline() if out is not None else b""
        if not line:
            code = await self._process.wait()
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise ClientFailedError(f"a client process ended with exit code {code}: {said}")
        return self._messages.decode(line)

    async def expect_ready(self) -> None:
        if not isinstance(message := await self._next(), Ready):
            raise ClientFailedError(f"a client began with {message}")

    async def follow(
        self,
        zero_s: float,
        record: Callable[[RequestRecord], None],
        report: Callable[[ClientReport], None],
    ) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            pipe.write(f"{zero_s!r}\n".encode())
            await pipe.drain()
        while True:
            message = await self._next()
            if isinstance(message, RequestRecord):
                record(message)
            elif isinstance(message, ClientReport):
                report(message)
                return


async def _together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all until the first failure, which is raised as itself and not in a group."""
    failures: list[ClientFailedError] = []
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* ClientFailedError as failed:
        failures += [error for error in failed.exceptions if isinstance(error, ClientFailedError)]
    if failures:
        raise failures[0]


@contextlib.asynccontextmanager
async def _client(order: ClientOrder) -> AsyncIterator[_Client]:
    """A process that has its order; it is ended with the block."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "loadtest.client",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is the parent's to hear
        )
        try:
            payload = msgspec.msgpack.encode(order)
            if process.stdin is not None:
                process.stdin.write(len(payload).to_bytes(8) + payload)
                with contextlib.suppress(ConnectionError):  # what it said tells why
                    await process.stdin.drain()
            yield _Client(process, errors)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()  # it ends by itself then
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
