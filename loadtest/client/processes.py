"""Several client processes that act as one: shares of a plan, a common clock, merged records."""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import IO

import msgspec

from loadtest.client.records import (
    CallRecord,
    ClientJob,
    ClientReady,
    ClientReport,
    Message,
    ServerOptions,
)
from loadtest.workloads.plan import Plan

_START_DELAY_S = 0.3
"""Time from the last client's readiness to second 0 of the plan, enough to notify all clients."""

_MAX_LINE_BYTES = 1 << 26
_STOP_LIMIT_S = 5.0


class ClientFailedError(RuntimeError):
    """A client process died, so that the measured load is incomplete."""


async def run_clients(
    plan: Plan,
    server: ServerOptions,
    *,
    clients: int,
    record: Callable[[CallRecord], None],
    keep_answers: bool = False,
    on_start: Callable[[float], None] | None = None,
) -> list[ClientReport]:
    """Run a plan with several client processes; return one report per client.

    Conversations are distributed round-robin. ``record`` receives each finished request, nearly in
    the order of their ends; ``on_start`` receives second 0 of the plan on the monotonic clock.

    Raises:
        ClientFailedError: A client process died.
    """
    reports: list[ClientReport] = []
    async with contextlib.AsyncExitStack() as stack:
        running = []
        for number in range(clients):
            job = ClientJob(
                client=number,
                server=server,
                plan=plan.share(number, clients),
                keep_answers=keep_answers,
            )
            running.append(await stack.enter_async_context(_client(job)))
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

    async def _next(self) -> CallRecord | ClientReport | ClientReady:
        out = self._process.stdout
        line = await out.readline() if out is not None else b""
        if not line:
            code = await self._process.wait()
            self._errors.seek(0)
            output = self._errors.read()[-2000:].decode("utf-8", "replace").strip()
            raise ClientFailedError(f"a client process ended with exit code {code}: {output}")
        return self._messages.decode(line)

    async def expect_ready(self) -> None:
        if not isinstance(message := await self._next(), ClientReady):
            raise ClientFailedError(f"a client sent {message} before it was ready")

    async def follow(
        self,
        zero_s: float,
        record: Callable[[CallRecord], None],
        report: Callable[[ClientReport], None],
    ) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            pipe.write(f"{zero_s!r}\n".encode())
            await pipe.drain()
        while True:
            message = await self._next()
            if isinstance(message, CallRecord):
                record(message)
            elif isinstance(message, ClientReport):
                report(message)
                return


async def _together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run all until the first failure, and raise it without an exception group."""
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
async def _client(job: ClientJob) -> AsyncIterator[_Client]:
    """Run a client process with its job during the block."""
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
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        try:
            payload = msgspec.msgpack.encode(job)
            if process.stdin is not None:
                process.stdin.write(len(payload).to_bytes(8) + payload)
                with contextlib.suppress(ConnectionError):  # its standard error has the reason
                    await process.stdin.drain()
            yield _Client(process, errors)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()  # the client exits then
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
