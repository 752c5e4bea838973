"""Routes an engine's reports to the requests they are about, and keeps its latest load."""

import statistics
from collections import deque
from collections.abc import Callable
from typing import IO

from engine.core import events as ev
from engine.core.blocks import BlockCounts
from engine.core.params import AdapterRef
from engine.process import messages
from engine.process.client import EngineClient
from engine.settings import EngineSettings

Handler = Callable[[messages.RequestReport | ev.Ended], None]

_PRIOR_PREFILL_TOKENS_PER_S = 500.0
_PRIOR_DECODE_STEP_S = 0.03


class EngineHandle:
    """One engine, shared by the two services of a worker.

    Args:
        settings: How to build the engine.
        on_progress: Called with a line of text while it loads.
        stderr: Where the engine process writes its errors.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_progress: Callable[[str], None] = lambda _: None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.client = EngineClient(settings, self._on_report, on_progress, stderr)
        self.load = ev.StepDone()
        self.sick = ""
        self.adapters: set[bytes] = set()  # digests of those that the engine holds
        self.on_cache_changed: Callable[[ev.CacheChanged], None] = lambda _: None
        self.on_adapter_changed: Callable[[ev.AdapterChanged], None] = lambda _: None
        self.after_step: list[Callable[[ev.StepDone], None]] = []
        self._handlers: dict[str, Handler] = {}
        self._adapter_of: dict[str, AdapterRef] = {}  # by live request
        self._prefill_rate = 0.0
        self._decode_steps_s: deque[float] = deque(maxlen=64)

    async def start(self, timeout_s: float = 120.0) -> messages.Ready:
        """Start the engine; see ``EngineClient.start``."""
        ready = await self.client.start(timeout_s)
        total = ready.geometry.num_blocks
        self.load = ev.StepDone(blocks=BlockCounts(total=total, free=total))
        return ready

    def submit(self, command: messages.Submit, handler: Handler) -> None:
        """Queue a request; ``handler`` gets all its reports, ``Ended`` last."""
        self._handlers[command.request_id] = handler
        if command.spec.adapter is not None:
            self._adapter_of[command.request_id] = command.spec.adapter
        self.client.send(command)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of live requests' adapters: those that are held, and those that are waited for."""
        held: set[str] = set()
        waiting: set[str] = set()
        for ref in self._adapter_of.values():
            (held if bytes.fromhex(ref.digest) in self.adapters else waiting).add(ref.name)
        return sorted(held), sorted(waiting)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Fitted rate at which prompts are computed."""
        return self._prefill_rate or _PRIOR_PREFILL_TOKENS_PER_S

    @property
    def decode_step_s(self) -> float:
        """Median of recent steps without prompt tokens."""
        steps = self._decode_steps_s
        return statistics.median(steps) if steps else _PRIOR_DECODE_STEP_S

    def _on_report(self, report: messages.Report) -> None:
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
                self._adapter_of.pop(report.request_id, None)
                handler = self._handlers.pop(report.request_id, None)
                if handler is not None:
                    handler(report)
            case messages.Progress() | messages.Ready() | messages.Fatal():
                pass
            case _:
                handler = self._handlers.get(report.request_id)
                if handler is not None:
                    handler(report)

    def _note_adapter(self, change: ev.AdapterChanged) -> None:
        digest = bytes.fromhex(change.digest)
        if change.what == "loaded":
            self.adapters.add(digest)
        else:
            self.adapters.discard(digest)
        self.on_adapter_changed(change)

    def _note_step(self, step: ev.StepDone) -> None:
        self.load = step
        seconds = step.duration_ns / 1e9
        if not seconds:  # a status between steps, or a step that failed
            pass
        elif step.prompt_tokens >= 32:  # smaller ones say more about overhead than about the rate
            rate = step.prompt_tokens / seconds
            self._prefill_rate = (
                0.7 * self._prefill_rate + 0.3 * rate if self._prefill_rate else rate
            )
        elif step.decode_rows and not step.prompt_tokens:
            self._decode_steps_s.append(seconds)
        for callback in self.after_step:
            callback(step)
