"""Runs batches: each line is a call of this router's own application, on behalf of its tenant.

Lines are validated, admitted, placed and counted as all other requests, at the lowest priority. At
most ``at_once`` lines of all batches run at a time, and a tenant's batches run one after the other.
Lines that are rejected by overload (429, 503, 504) are retried until the batch expires; they do not
occupy a slot while they wait. The number of retries after lost workers is limited, because the line
may be the cause.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
from starlette.types import ASGIApp

from baton.types.errors import BatonError, UnavailableError, WorkerLostError, from_code
from router.frontend.batch.answers import AnswerFiles, has_more_lines, lines_of
from router.frontend.batch.lines import (
    LineFault,
    LineRequest,
    answer_line,
    fault_line,
    read_line,
)
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from router.process import Process

_LOG = logging.getLogger(__name__)

MAX_LINES = 50_000
_MAX_LINE_ENDS = 4 * MAX_LINES  # with empty lines, which are skipped
_POLL_S = 0.5
_SAVE_S = 1.0
_SWEEP_S = 3600.0
_SHORT_SWEEP_S = 60.0  # with a tenant that has a limit of its own
_READ_AHEAD_LINES = 32
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_TIMEOUT_MS = 24 * 3600 * 1000
_TRY_AGAIN = (429, 503, 504)
_MOST_LOST = 3  # attempts of a line that end with lost workers
_AFTER_FAULT_S = 10.0  # pause before a batch restarts whose files cannot be written


class BatchRunner:
    """Runs the batches of the fleet in the router that holds the lock."""

    def __init__(self, store: BatchStore, router: Process) -> None:
        self.store = store
        self.router = router
        self.places = asyncio.Semaphore(store.limits.at_once)
        self._tasks = router.tasks
        self._running: dict[str, _Run] = {}  # by tenant

    def start(self, app: ASGIApp) -> None:
        """Start running batches; ``app`` handles their lines."""
        self._tasks.keep(lambda: self._look(app), "batches")

    async def _look(self, app: ASGIApp) -> None:
        """Wait for the lock, then run batches."""
        with ExitStack() as held:
            while not await asyncio.to_thread(held.enter_context, self.store.lock()):
                held.close()
                await asyncio.sleep(_POLL_S)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            # The header x-baton-timeout-ms limits a line to the expiry of its batch.
            client = httpx.AsyncClient(
                transport=transport,
                base_url="http://batch",
                timeout=_MAX_TIMEOUT_MS / 1000,
                trust_env=False,
            )
            async with client:
                # An error in this task must not release the lock while lines are running.
                await self._tasks.keep(lambda: self._attend_all(client), "batches")

    async def _attend_all(self, client: httpx.AsyncClient) -> None:
        """Start and end batches until cancelled."""
        sweep_at_s = 0.0
        while True:
            if time.monotonic() >= sweep_at_s:
                await asyncio.to_thread(self.store.sweep, time.time())
                policies = self.router.policies.all.values()
                is_short = any(policy.keep_s is not None for policy in policies)
                sweep_at_s = time.monotonic() + (_SHORT_SWEEP_S if is_short else _SWEEP_S)
            for batch in await asyncio.to_thread(self.store.open_batches):
                await self._attend(batch, client)
            for run in list(self._running.values()):
                if not await asyncio.to_thread(self.store.has, run.batch):
                    run.stop()
            await asyncio.sleep(_POLL_S)

    async def _attend(self, batch: BatchRecord, client: httpx.AsyncClient) -> None:
        """Start a batch if its tenant has none running; end one that is cancelled or expired."""
        run = self._running.get(batch.tenant)
        if run is None:
            # It may have ended since the list was read.
            current = await asyncio.to_thread(self.store.batch, batch.tenant, batch.id)
            if current is None or current.ended:
                return
            run = self._running[batch.tenant] = _Run(current, self, client)
            self._tasks.spawn(self._finish(run), "batch")
        is_cancelled = await asyncio.to_thread(self.store.is_cancelled, batch)
        if run.batch.id == batch.id:
            if is_cancelled:
                run.cancel()
        elif is_cancelled or batch.expires_s < time.time():
            waiting = _Run(batch, self, client)  # for another batch of its tenant
            if is_cancelled:
                waiting.cancel()
            await waiting.end()

    async def _finish(self, run: "_Run") -> None:
        try:
            await run.all_lines()
        except* OSError as group:
            fault = group.exceptions[0]
            _LOG.warning("restarting batch=%s in %g s: %s", run.batch.id, _AFTER_FAULT_S, fault)
            await asyncio.sleep(_AFTER_FAULT_S)  # no batch of this tenant runs meanwhile
        finally:
            self._running.pop(run.batch.tenant, None)


class _Run:
    def __init__(self, batch: BatchRecord, runner: BatchRunner, client: httpx.AsyncClient) -> None:
        self.batch = batch
        self._store = runner.store
        self._client = client
        self._places = runner.places
        # limits started lines of this batch
        self._lines = asyncio.Semaphore(runner.store.limits.at_once)
        self._max_line_bytes = runner.router.settings.max_body_bytes
        own_key = runner.router.access.own_key  # calls fail when the tenant has no API key any more
        self._headers = {"authorization": f"Bearer {own_key}", "x-baton-tenant": batch.tenant}
        self._metrics = runner.router.metrics
        self._enough = asyncio.Event()  # cancelled, no space, or the record is gone
        self._saved_s = 0.0

    def cancel(self) -> None:
        """Cancel the batch, and its running lines with it."""
        self.batch.cancel(time.time())
        self.stop()

    def stop(self) -> None:
        """Cancel running lines, and start no further ones."""
        self._enough.set()

    async def all_lines(self) -> None:
        """Run the remaining lines, then convert the output to files."""
        batch = self.batch
        store = self._store
        if batch.is_closing:  # an earlier router did not finish ending it
            await self.end()
            return
        path = store.data_path(batch.tenant, batch.input_file_id)
        try:
            total = await asyncio.to_thread(self._count, path)
        except FileNotFoundError:
            await self._fail(
                "input_file_gone", f"input file {batch.input_file_id} no longer exists"
            )
            return
        if not 1 <= total <= MAX_LINES:
            code = "too_many_lines" if total else "empty_file"
            await self._fail(
                code, f"the input file has {total} lines; a batch must have 1 to {MAX_LINES}"
            )
            return
        batch.begin(total, time.time())
        files = await asyncio.to_thread(self._open)
        try:
            await self._save(files)
            await self._run_lines(files, path)
        finally:
            files.close()
            batch.completed = files.completed
            batch.failed = files.failed
        await self.end()

    def _count(self, path: Path) -> int:
        if has_more_lines(path, _MAX_LINE_ENDS):
            return MAX_LINES + 1
        lines = lines_of(path, self._max_line_bytes)
        return sum(1 for _ in itertools.islice(lines, MAX_LINES + 1))

    def _open(self) -> AnswerFiles:
        room = self._store.room_bytes(self.batch.tenant)
        output, errors = (self._store.path_of(self.batch, kind) for kind in ("output", "errors"))
        return AnswerFiles(output, errors, room)

    async def _run_lines(self, files: AnswerFiles, path: Path) -> None:
        seen: set[bytes] = set()
        lines = lines_of(path, self._max_line_bytes)
        left_s = self.batch.expires_s - time.time()
        try:
            async with asyncio.timeout(max(left_s, 0)), asyncio.TaskGroup() as both:
                stop = both.create_task(self._stop_when_enough())
                async with asyncio.TaskGroup() as group:  # ends with its last line
                    while piece := await asyncio.to_thread(self._read, lines, seen):
                        for number, line in piece:
                            if number in files.done:
                                continue
                            await self._lines.acquire()
                            task = group.create_task(self._one(files, number, line))
                            task.add_done_callback(lambda _: self._lines.release())
                stop.cancel()
        except* (_EnoughError, TimeoutError):
            pass

    def _read(
        self, lines: Iterator[tuple[int, bytes]], seen: set[bytes]
    ) -> list[tuple[int, LineRequest | LineFault]]:
        endpoint = self.batch.endpoint
        most = self._max_line_bytes
        return [
            (number, read_line(raw, number, endpoint, seen, most))
            for number, raw in itertools.islice(lines, _READ_AHEAD_LINES)
        ]

    async def _stop_when_enough(self) -> None:
        await self._enough.wait()
        raise _EnoughError  # cancels all lines

    async def _one(self, files: AnswerFiles, number: int, line: LineRequest | LineFault) -> None:
        if isinstance(line, LineFault):
            written = fault_line(self.batch.id, number, line)
            ok = False
        else:
            answer = await self._ask(line)
            ok = answer.status_code == httpx.codes.OK
            written = answer_line(
                self.batch.id,
                number,
                line.custom_id,
                status=answer.status_code,
                request_id=answer.headers.get("x-request-id", ""),
                body=answer.content,
            )
        # Not in a thread: cancellation must not leave a partial line.
        if not files.write(number, written, ok=ok):
            self._no_room()
            return
        self._metrics.inc("baton_batch_lines", outcome="completed" if ok else "failed")
        if time.monotonic() > self._saved_s + _SAVE_S:
            await self._save(files)

    async def _ask(self, line: LineRequest) -> httpx.Response:
        pause_s = _FIRST_PAUSE_S
        lost = 0
        while True:
            left_ms = int((self.batch.expires_s - time.time()) * 1000)
            timeout_ms = str(min(max(left_ms, 1), _MAX_TIMEOUT_MS))
            headers = {**self._headers, "x-baton-timeout-ms": timeout_ms}
            async with self._places:
                answer = await self._client.post(
                    self.batch.endpoint, content=line.body, headers=headers
                )
            if answer.status_code not in _TRY_AGAIN:
                return answer
            error = _error_of(answer)
            lost += isinstance(error, WorkerLostError)
            if not error.retryable or lost == _MOST_LOST:
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _no_room(self) -> None:
        limits = self._store.limits
        self.batch.fail(
            "storage_full",
            f"the output would exceed the limit of {limits.max_bytes_per_tenant} bytes of one "
            f"tenant, or {limits.max_bytes} of all tenants",
        )
        self.stop()

    async def _save(self, files: AnswerFiles) -> None:
        self._saved_s = time.monotonic()
        self.batch.completed = files.completed
        self.batch.failed = files.failed
        if not await asyncio.to_thread(self._store.save_known, self.batch):
            self.stop()

    async def _fail(self, code: str, message: str) -> None:
        self.batch.fail(code, message)
        await self.end()

    async def end(self) -> None:
        """Convert the output to files, and store the end of the batch.

        Of a batch whose record was deleted meanwhile nothing is kept.
        """
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._store.changing(self.batch.tenant):
            if self._store.has(self.batch):
                self._keep()
            else:
                self._store.remove(self.batch.tenant, "batches", self.batch.id)

    def _keep(self) -> None:
        batch = self.batch
        store = self._store
        now_s = time.time()
        paths = {kind: store.path_of(batch, kind) for kind in ("output", "errors")}
        if not (batch.output_file_id or batch.error_file_id):
            batch.name_files(*map(store.new_id, paths.values()))
            store.save(batch)  # if the router dies from here on, no output is lost
        named = (batch.output_file_id, batch.error_file_id)
        for (kind, path), file_id in zip(paths.items(), named, strict=True):
            if file_id is None:
                path.unlink(missing_ok=True)
            else:
                store.adopt(batch.tenant, path, file_id, f"{batch.id}_{kind}.jsonl", now_s)
        batch.finish(now_s)
        store.save(batch)
        store.path_of(batch, "cancel").unlink(missing_ok=True)
        _LOG.info("ended batch=%s tenant=%s state=%s", batch.id, batch.tenant, batch.state)


class _EnoughError(Exception):
    """No further line is to be run."""


def _error_of(answer: httpx.Response) -> BatonError:
    try:
        code = msgspec.json.decode(answer.content)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = UnavailableError.code
    return from_code(code, "")
