"""Dispatch of an engine's reports to their requests, and its latest load."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from baton.engine.ipc import give_back
from baton.engine.process import messages
from baton.engine.process.client import EngineClient
from baton.engine.process.link import InnerLink
from baton.engine.process.step_rates import StepRates
from baton.telemetry.alive_clock import ALIVE
from baton.types import events as ev
from baton.types.errors import from_code
from baton.types.params import AdapterRef
from baton.types.pool_counts import BlockCounts

_LOG = logging.getLogger(__name__)

Handler = Callable[[messages.RequestReport | ev.Ended], None]

PROBES = ("d/probe-", "p/probe-")
"""Begins of the ids of routers' probes, which come also to an idle worker."""

SILENCE_NS = 3_000_000_000
"""Silence after which an engine with short steps counts as hung; a loop without steps reports."""

SERVER_SILENCE_NS = 10_000_000_000
"""The same for a server that the worker has started: it may take 8 s to answer on busy cores."""

_STEPS_OF_SILENCE = 3  # further silence allowed, in steps as long as the longest recent one
_RECENT_STEPS = 64


class EngineHandle:
    """Engine shared by the two services of a worker.

    Args:
        client: Connection to it.
        is_server: Whether it is a server that the worker has started.
    """

    def __init__(self, client: EngineClient | InnerLink, *, is_server: bool = False) -> None:
        total = client.ready.geometry.num_blocks
        self.client = client
        self.load = ev.StepDone(blocks=BlockCounts(total=total, free=total))
        self.sick = ""
        self.silent = False  # the step loop hangs or is stopped
        self._silence_ns = SERVER_SILENCE_NS if is_server else SILENCE_NS
        self.may_be_silent: Callable[[], bool] = lambda: True
        self._report_ns = ALIVE.now_ns()
        self.adapters: set[bytes] = set()  # digests of loaded adapters
        self.on_cache_changed: Callable[[ev.CacheChanged], None] = lambda _: None
        self.on_adapter_changed: Callable[[ev.AdapterChanged], None] = lambda _: None
        self.after_step: list[Callable[[ev.StepDone], None]] = []
        self._handlers: dict[str, Handler] = {}
        self._names = 0  # number of names issued
        self._probes: set[str] = set()  # ids of live probe requests
        self._adapters_asked: dict[str, AdapterRef] = {}  # adapters of live requests
        self.used_ns = ALIVE.now_ns()  # last begin or end of a request other than probes, probes
        self._slept: asyncio.Future[int] | None = None
        self._erasures: deque[asyncio.Future[dict[str, int]]] = deque()
        self.rates = StepRates()
        self._durations_ns: deque[int] = deque([0], maxlen=_RECENT_STEPS)
        self._load_ns = time.monotonic_ns()  # time of ``load``
        self._submitted_ns = 0  # time of the last request
        client.listen(self._on_report)

    def unused_name(self, of: str) -> str:
        """Return a new request id; the engine may still be ending an earlier request."""
        self._names += 1
        return f"{of}/{self._names}"

    def submit(self, command: messages.Submit, handler: Handler, *, is_probe: bool = False) -> None:
        """Queue a request; ``handler`` receives all its reports, ``Ended`` last."""
        self._handlers[command.request_id] = handler
        if is_probe:
            self._probes.add(command.request_id)
        self._note_use(command.request_id)
        self._submitted_ns = time.monotonic_ns()
        if command.spec.adapter is not None:
            self._adapters_asked[command.request_id] = command.spec.adapter
        send = self.client.send_now if is_probe else self.client.send
        send(msgspec.structs.replace(command, sent_ns=self._submitted_ns))

    async def sleep(self) -> bool:
        """Give back the memory of the KV pool; False if requests run.

        All commands for the engine are held until `EngineClient.release`, except those of probes.
        """
        if self._handlers:
            return False
        self.client.hold()
        self._slept = asyncio.get_running_loop().create_future()
        self.client.send_now(messages.Sleep())
        if await self._slept:  # blocks are being copied to a tier
            self.client.release()
            return False
        for pool in self.client.pools:
            give_back(pool)
        return True

    async def forget(self, tags: frozenset[bytes]) -> dict[str, int]:
        """Erase all cached blocks with these tags; return their number by tier, -1: an error."""
        done: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._erasures.append(done)
        self.client.send(messages.EraseBlocks(tags))
        return await done

    async def expand(self, image: bytes) -> messages.ImageExpanded:
        """Return the tokens that stand for an image; only for engines with images."""
        name = self.unused_name("image")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._handlers[name] = done.set_result
        try:
            self.client.send(messages.ExpandImage(name, image))
            report: messages.ImageExpanded | ev.Ended = await done
        finally:
            self._handlers.pop(name, None)
        if isinstance(report, ev.Ended):
            raise from_code(report.error_code, report.error_message)
        return report

    @property
    def has_work(self) -> bool:
        """Return whether requests other than probes run or hold blocks."""
        return len(self._handlers) > len(self._probes)

    @property
    def has_probe(self) -> bool:
        """Return whether a probe request runs."""
        return bool(self._probes)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of live requests' adapters: loaded ones, and awaited ones."""
        held: set[str] = set()
        waiting: set[str] = set()
        for ref in self._adapters_asked.values():
            (held if bytes.fromhex(ref.digest) in self.adapters else waiting).add(ref.name)
        return sorted(held), sorted(waiting)

    def load_age_ns(self, now_ns: int) -> int:
        """Return the age of ``load``; 0 if the engine is idle, or reports each change at once."""
        if self.load.present:
            return 0
        unread = self._submitted_ns >= self._load_ns  # the step had begun already
        computes = self.load.answering or self.load.queued_prompt_tokens or unread
        return max(now_ns - self._load_ns, 0) if computes else 0

    def watch(self, alive_ns: int) -> None:
        """Notice a step loop that reports nothing; call this several times a second.

        Steps over a long context can take seconds on a CPU, so the limit grows with recent steps.

        Args:
            alive_ns: The time by ``baton.telemetry.alive_clock``.
        """
        limit_ns = self._silence_ns + _STEPS_OF_SILENCE * max(self._durations_ns)
        is_late = alive_ns - self._report_ns > limit_ns
        if is_late and not self.silent and self.may_be_silent():
            self.silent = True
            _LOG.warning("received no engine report for %.0f s", limit_ns / 1e9)

    def _note_report(self) -> None:
        self._report_ns = ALIVE.now_ns()
        if self.silent:
            self.silent = False
            _LOG.warning("received engine reports again")

    def _on_report(self, report: messages.Report) -> None:
        self._note_report()
        match report:
            case ev.StepDone():
                self._note_step(report)
            case ev.CacheChanged():
                self.on_cache_changed(report)
            case ev.AdapterChanged():
                self._note_adapter(report)
            case messages.Sick():
                self.sick = report.message
            case messages.BlocksErased():
                self._note_erasure(report.blocks)
            case messages.Slept():
                if self._slept is not None and not self._slept.done():
                    self._slept.set_result(report.left)
            case ev.Ended():
                self._note_use(report.request_id)
                self._adapters_asked.pop(report.request_id, None)
                self._probes.discard(report.request_id)
                self._deliver(self._handlers.pop(report.request_id, None), report)
            case messages.LoadProgress() | messages.Ready() | messages.Fatal() | messages.Alive():
                pass
            case _:
                self._deliver(self._handlers.get(report.request_id), report)

    def _deliver(self, handler: Handler | None, report: messages.RequestReport | ev.Ended) -> None:
        """Call a request's handler; if it raises, end only this request."""
        if handler is None:
            return
        try:
            handler(report)
        except Exception as error:  # noqa: BLE001 - logged, and the request ends
            name = report.request_id
            _LOG.exception("failed to handle an engine report request=%s", name)
            if self._handlers.pop(name, None) is None:
                return  # its end was delivered
            self.client.send(messages.Cancel(name))
            handler(ev.Ended(name, "internal_error", f"{type(error).__name__}: {error}"))

    def _note_use(self, request_id: str) -> None:
        if request_id not in self._probes and not request_id.startswith(PROBES):
            self.used_ns = ALIVE.now_ns()

    def _note_erasure(self, blocks: dict[str, int]) -> None:
        done = self._erasures.popleft()
        if not done.done():
            done.set_result(blocks)

    def _note_adapter(self, change: ev.AdapterChanged) -> None:
        digest = bytes.fromhex(change.digest)
        if change.what == "loaded":
            self.adapters.add(digest)
        else:
            self.adapters.discard(digest)
        self.on_adapter_changed(change)

    def _note_step(self, step: ev.StepDone) -> None:
        self.load = step
        self.rates.add(step)
        self._durations_ns.append(step.duration_ns)
        self._load_ns = time.monotonic_ns() - step.duration_ns
        for callback in self.after_step:
            callback(step)
