"""Routes an engine's reports to the requests they are about, and keeps its latest load."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from baton.engine.process import messages
from baton.engine.process.client import EngineClient
from baton.engine.process.step_rates import PromptFit, StepRates
from baton.engine.settings import EngineSettings
from baton.telemetry.alive_clock import ALIVE
from baton.types import events as ev
from baton.types.params import AdapterRef
from baton.types.pool_counts import BlockCounts

_LOG = logging.getLogger(__name__)

Handler = Callable[[messages.RequestReport | ev.Ended], None]

SILENCE_NS = 3_000_000_000
"""Silence after which an engine with short steps counts as hung; a loop without steps reports."""

_STEPS_OF_SILENCE = 3  # steps as long as the longest recent one that may pass besides
_RECENT_STEPS = 64


class EngineHandle:
    """One engine, shared by the two services of a worker.

    Args:
        client: Of an engine that is ready.
    """

    def __init__(self, client: EngineClient) -> None:
        total = client.ready.geometry.num_blocks
        self.client = client
        self.load = ev.StepDone(blocks=BlockCounts(total=total, free=total))
        self.sick = ""
        self.silent = False  # the step loop hangs, or is stopped
        self._heard_ns = ALIVE.now_ns()
        self.adapters: set[bytes] = set()  # digests of those that the engine holds
        self.on_cache_changed: Callable[[ev.CacheChanged], None] = lambda _: None
        self.on_adapter_changed: Callable[[ev.AdapterChanged], None] = lambda _: None
        self.after_step: list[Callable[[ev.StepDone], None]] = []
        self._handlers: dict[str, Handler] = {}
        self._names = 0  # given so far
        self._canaries: set[str] = set()  # of those
        self._adapters_asked: dict[str, AdapterRef] = {}  # by live requests
        self._rates = StepRates()
        self._durations_ns: deque[int] = deque([0], maxlen=_RECENT_STEPS)
        self._load_ns = time.monotonic_ns()  # when the engine was as ``load`` says
        self._asked = False  # something of it since
        client.listen(self._on_report)

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        on_progress: Callable[[str], None] = lambda _: None,
        stderr: IO[bytes] | None = None,
        count_task_failure: Callable[[str], None] = lambda _: None,
    ) -> "EngineHandle":
        """Start an engine; see ``EngineClient.start``."""
        client = await EngineClient.start(
            settings, on_progress, stderr, count_task_failure=count_task_failure
        )
        return cls(client)

    def unused_name(self, of: str) -> str:
        """A name for a request that the engine never had: it may still end one of before."""
        self._names += 1
        return f"{of}/{self._names}"

    def submit(
        self, command: messages.Submit, handler: Handler, *, is_canary: bool = False
    ) -> None:
        """Queue a request; ``handler`` gets all its reports, ``Ended`` last."""
        self._handlers[command.request_id] = handler
        if is_canary:
            self._canaries.add(command.request_id)
        self._asked = True
        if command.spec.adapter is not None:
            self._adapters_asked[command.request_id] = command.spec.adapter
        self.client.send(command)

    @property
    def has_work(self) -> bool:
        """Whether anyone but the worker itself has a request here, or holds its blocks."""
        return len(self._handlers) > len(self._canaries)

    @property
    def has_canary(self) -> bool:
        """Whether the worker has a request of its own here."""
        return bool(self._canaries)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of live requests' adapters: those that are held, and those that are waited for."""
        held: set[str] = set()
        waiting: set[str] = set()
        for ref in self._adapters_asked.values():
            (held if bytes.fromhex(ref.digest) in self.adapters else waiting).add(ref.name)
        return sorted(held), sorted(waiting)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Fitted rate at which prompts are computed; 0 until one was."""
        return self._rates.prefill_tokens_per_s

    @property
    def prompt_fit(self) -> PromptFit:
        """What a prompt token takes, and one of those before it."""
        return self._rates.prompt_fit

    @property
    def decode_step_s(self) -> float:
        """Median of recent steps without prompt tokens; 0 until there was one."""
        return self._rates.decode_step_s

    def load_age_ns(self, now_ns: int) -> int:
        """How old ``load`` is; 0 where the engine has nothing to compute, and so is up to date."""
        computes = self.load.answering or self.load.queued_prompt_tokens or self._asked
        return max(now_ns - self._load_ns, 0) if computes else 0

    def watch(self, alive_ns: int) -> None:
        """Notice a step loop that reports nothing; call this several times a second.

        Steps over a long context can take seconds on a CPU, so the limit grows with recent steps.

        Args:
            alive_ns: The time by ``baton.telemetry.alive_clock``.
        """
        limit_ns = SILENCE_NS + _STEPS_OF_SILENCE * max(self._durations_ns)
        if not self.silent and alive_ns - self._heard_ns > limit_ns:
            self.silent = True
            _LOG.warning("the engine has reported nothing for %.0f s", limit_ns / 1e9)

    def _note_heard(self) -> None:
        self._heard_ns = ALIVE.now_ns()
        if self.silent:
            self.silent = False
            _LOG.warning("the engine answers again")

    def _on_report(self, report: messages.Report) -> None:
        self._note_heard()
        match report:
            case ev.StepDone():
                self._note_step(report)
            case ev.CacheChanged():
                self.on_cache_changed(report)
            case ev.AdapterChanged():
                self._note_adapter(report)
            case messages.Sick():
                self.sick = report.message
            case ev.Ended():
                self._adapters_asked.pop(report.request_id, None)
                self._canaries.discard(report.request_id)
                self._tell(self._handlers.pop(report.request_id, None), report)
            case messages.Progress() | messages.Ready() | messages.Fatal() | messages.Alive():
                pass
            case _:
                self._tell(self._handlers.get(report.request_id), report)

    def _tell(self, handler: Handler | None, report: messages.RequestReport | ev.Ended) -> None:
        """A handler that raises ends its own request, and no other."""
        if handler is None:
            return
        try:
            handler(report)
        except Exception as error:  # noqa: BLE001 - logged, and the request is told
            name = report.request_id
            _LOG.exception("a report of request %s could not be handled", name)
            if self._handlers.pop(name, None) is None:
                return  # it was told of its end
            self.client.send(messages.Cancel(name))
            handler(ev.Ended(name, "internal_error", f"{type(error).__name__}: {error}"))

    def _note_adapter(self, change: ev.AdapterChanged) -> None:
        digest = bytes.fromhex(change.digest)
        if change.what == "loaded":
            self.adapters.add(digest)
        else:
            self.adapters.discard(digest)
        self.on_adapter_changed(change)

    def _note_step(self, step: ev.StepDone) -> None:
        self.load = step
        self._rates.add(step)
        self._durations_ns.append(step.duration_ns)
        self._load_ns = time.monotonic_ns() - step.duration_ns
        self._asked = False
        for callback in self.after_step:
            callback(step)
