"""Life of one attached server: examined, then a worker of the fleet until it is gone.

    absent ──healthy──▶ examined ──fits──▶ ready ──gone, replaced or broken──▶ absent
                            └──lacks something──▶ unfit ──(again)──▶ examined
    any ──leaves its source, or `drain`──▶ draining ──▶ left

The server itself is never changed.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from baton.addresses import join_address
from baton.engine.process.handle import EngineHandle
from baton.engine.process.link import InnerLink
from baton.engine.process.messages import Ready
from baton.engine.process.step_rates import StepRates
from baton.engine.remote.attached import Endpoints, ServerFacts, ServerKind, UnfitServerError
from baton.engine.remote.http import CONNECT_S, HttpOrigin, unavailable
from baton.registry.connection import RoundTrips
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import BatonError, UnavailableError
from baton.types.events import StepDone
from fleet.attached.sources import ServerEntry
from fleet.worker.settings import WorkerSettings
from fleet.worker.start import StartContext
from fleet.worker.worker import DRAIN_S, Worker

_LOG = logging.getLogger(__name__)

_RETRY_S = 0.5
_STEADY_S = 30.0  # a worker that lives as long is followed by another one at once
_MOST_PAUSE_S = 30.0  # behind short lives
_REASON_CHARACTERS = 400
_UNFIT_RETRY_S = 3.0
_LOST_DRAIN_S = 1.0  # for routers to take the requests of a server that is gone


class Attachment:
    """A server of one lane, and its worker while it has one.

    Args:
        settings: Returns the settings of a worker that begins.
        redis: Connection of all workers of this process.
        alone_on_host: Whether no other server of the fleet has its host.
        changed: Called after each change of the phase.

    Attributes:
        phase: ``starting`` until the server was looked at, then as in the picture.
        may_be_silent: Whether the server may be left because it answers slowly.
    """

    def __init__(
        self,
        entry: ServerEntry,
        kind: ServerKind,
        settings: Callable[[], WorkerSettings],
        redis: RoundTrips,
        alone_on_host: bool,
        changed: Callable[[], None],
    ) -> None:
        self.entry = entry
        self.phase = "starting"
        self.reason = ""
        self.may_be_silent: Callable[[], bool] = lambda: True
        self._handle: EngineHandle | None = None
        self._kind = kind
        self._settings = settings
        self._redis = redis
        self._alone_on_host = alone_on_host
        self._changed = changed
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._examining: asyncio.Timeout | None = None
        self._tasks = BackgroundTasks("attachment")
        self._hurried = asyncio.Event()
        self._origin = self._origin_at(entry.address)

    @property
    def answers(self) -> bool:
        """Return whether the server takes requests, and answers in time."""
        return self.phase == "ready" and self._handle is not None and not self._handle.silent

    def takes(self, entry: ServerEntry) -> bool:
        """Take a new key for later requests; return whether the entry has no other changes."""
        if not entry.problem:
            self._origin.key = entry.key
        if msgspec.structs.replace(self.entry, key=entry.key, problem=entry.problem) != entry:
            return False
        self.entry = entry
        return True

    def leave(self, *, at_once: bool = False) -> None:
        """Drain the worker and end; ``at_once`` does not wait for its requests."""
        if not self._left.done():
            self._left.set_result(None)
        if self._examining is not None:
            self._examining.reschedule(0)
        if at_once:
            self._hurried.set()

    async def run(self) -> None:
        """Keep a worker for the server while it is healthy, until it leaves."""
        logged = ""
        pause_s = 0.0
        while not self._left.done():
            try:
                found = await self._examine()
                if found is not None:
                    began_s = time.monotonic()
                    await self._serve(*found)
                    logged = ""
                    is_steady = time.monotonic() - began_s >= _STEADY_S
                    pause_s = 0.0 if is_steady else min(max(2 * pause_s, _RETRY_S), _MOST_PAUSE_S)
                    await self._pause(pause_s)
            except UnfitServerError as error:
                self._show("unfit", error.message)
                await self._pause(_UNFIT_RETRY_S)
            except BatonError as error:
                self._show("absent", error.message)
                await self._pause(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - shown, logged and tried again
                why = f"{type(error).__name__}: {error}"
                if why != logged:
                    _LOG.exception("cannot attach server=%s", self.entry.name)
                    logged = why
                self._show("unfit", why)
                await self._pause(_UNFIT_RETRY_S)
        self._show("left", "")

    async def _examine(self) -> tuple[ServerFacts, Endpoints, StepDone | None] | None:
        """Return properties, KV events and a past step of the server; None if it leaves."""
        if self.entry.problem:
            raise UnfitServerError(self.entry.problem)
        if self.entry.role == "prefill" and not self._kind.hand_off:
            raise UnfitServerError(f"{self.entry.label}: role: prefill needs `hand_off: nixl`")
        try:
            async with asyncio.timeout(None) as self._examining:
                await self._find()
                facts = await self._kind.examine(self._origin)
                events: Endpoints = ()
                if self.entry.events is not None or self._alone_on_host:
                    events = await self._kind.events(self._origin, facts, self.entry.events)
                return facts, events, await self._kind.past_step(self._origin)
        except TimeoutError:
            return None
        finally:
            self._examining = None

    async def _find(self) -> None:
        """Choose the address for a life of the worker: later lookups of its name may fail."""
        try:
            async with asyncio.timeout(CONNECT_S):
                _, found = await asyncio.open_connection(self.entry.host, self._origin.port)
        except OSError as error:
            what = f"no connection to {self._origin.name}"
            raise unavailable(what, self._origin, error) from None
        peer = found.get_extra_info("peername")
        found.close()
        if peer is None:
            raise UnavailableError(f"{self._origin.name} closed a connection at once")
        address = f"{peer[0]}%{peer[3]}" if any(peer[3:]) else str(peer[0])  # with the IPv6 zone
        if address != self.entry.host:
            self._origin = self._origin_at(address)

    def _origin_at(self, address: str) -> HttpOrigin:
        origin = HttpOrigin.of_url(self.entry.url, self.entry.key, address)
        origin.keeps = self._kind.keeps_connections
        return origin

    async def _serve(self, facts: ServerFacts, events: Endpoints, past: StepDone | None) -> None:
        """Run one life of the worker."""
        self._show("starting", "")
        settings = msgspec.structs.replace(
            self._settings(),
            server=join_address(self._origin.host, self._origin.port),
            unseen_block_tokens=facts.block_tokens * (facts.blocks > 0 and not events),
        )
        _LOG.info(
            "attaching worker=%s server=%s %s model=%s blocks=%d of %d tokens, KV events: %s",
            settings.worker_id,
            self.entry.name,
            facts.engine,
            facts.model,
            facts.blocks,
            facts.block_tokens,
            ", ".join(stream for stream, _ in events) or "none, so prefixes are approximate",
        )
        link = InnerLink(self._ready(facts))
        engine = self._kind.engine(link.report, self._origin, facts, events)
        link.handle = engine.handle
        link.close = engine.close

        async def connect(context: StartContext, stack: AsyncExitStack) -> EngineHandle:
            stack.push_async_callback(link.stop)
            handle = EngineHandle(link)
            handle.may_be_silent = self.may_be_silent
            self._handle = handle
            if "BATON_PICKER" in os.environ:
                handle.rates = _UnmeasuredRates()
            if past is not None:
                StepRates.add(handle.rates, past)
            return handle

        worker = await Worker.start(settings, connect, redis=self._redis)
        self._show("ready", "")
        ended = self._tasks.spawn(_end_of(worker), "worker")
        ends = (ended, self._left, engine.broken)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            lost = engine.broken.result() if engine.broken.done() else ""
            if not ended.done():
                self._show("draining", lost)
                await worker.drain(_LOST_DRAIN_S if lost else DRAIN_S, self._hurried)
                await worker.stop()
        finally:
            await worker.stop()
            await worker.closed()
            ended.cancel()
        if not self._left.done():
            why = lost or f"{self.entry.label}: its worker failed; see the log"
            _LOG.warning("lost worker=%s: %s", settings.worker_id, why)
            self._show("absent", why)

    def _ready(self, facts: ServerFacts) -> Ready:
        own = self._kind.describe(facts)
        artifact = self._kind.artifact
        config = artifact.config
        return Ready(
            pid=os.getpid(),
            geometry=own.geometry,
            numerics_id=own.numerics_id,
            weights_digest=artifact.weights_digest,
            eos_token_ids=config.eos_token_ids,
            max_context_tokens=facts.max_context_tokens or config.max_context_tokens,
            threads=0,
            load_s=0.0,
            hand_off=own.hand_off,
        )

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait((self._left,), timeout=seconds)

    def _show(self, phase: str, reason: str) -> None:
        short = reason[:_REASON_CHARACTERS]  # as it may have a server's text
        reason = "".join(one if one.isprintable() else " " for one in short)
        if (phase, reason) != (self.phase, self.reason):
            self.phase = phase
            self.reason = reason
            self._changed()


class _UnmeasuredRates(StepRates):
    """Rates of a server whose requests come past Baton: probes show nothing of its speed."""

    def add(self, step: StepDone) -> None:
        """Ignore a step."""


async def _end_of(worker: Worker) -> None:
    await worker.wait()
